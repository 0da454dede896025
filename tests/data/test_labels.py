"""Answers marked good or bad (KTO): the shapes of other tools, labels in the trainer's rows, and what is wrong."""

import pytest
from small_data import prepare, talk

from finetune.data.tokens import NOT_TRAINED
from finetune.recipe import recipe_from

HELLO = talk("Hi", "Hello")["messages"]
SHAPES = {
    "trl": {"prompt": HELLO[:1], "completion": HELLO[1:], "label": True},
    "messages": {"messages": HELLO, "label": "true"},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "label": 1},
    "alpaca": {"instruction": "Hi", "input": "", "output": "Hello", "label": 1.0},
}


def labelled(path, **more):
    return recipe_from({"model_name_or_path": "tiny", "dataset": {"path": path}, "method": "kto", **more})


def test_labels_stay_with_their_rows_through_shards_truncation_and_holding_out(write, tokenizer):
    rows = [talk(f"Is {n} even?", "Yes." if n % 2 == 0 else "Yes, of course it is") | {"label": n % 2 == 0} for n in range(40)]
    path = write("rows.jsonl", [{"label": True}, *rows])
    recipe = labelled(path, dataset={"path": path, "test_split_size": 10, "on_bad_rows": "skip"}, excess_length="truncate")
    longest = max(prepare(recipe, tokenizer, max_length=None).lengths)
    for limit in (None, longest - 1):
        prepared = prepare(recipe, tokenizer, max_length=limit)
        for part in (prepared.train, prepared.eval):
            texts = [tokenizer.decode([t for t in row["labels"] if t != NOT_TRAINED]) for row in part]
            assert ["of course" not in text for text in texts] == part["desirable"]
    assert (len(prepared.train), len(prepared.eval), len(prepared.report.rows_refused)) == (30, 10, 1)


@pytest.mark.parametrize(
    ("row", "method"),
    [
        (SHAPES["trl"], "kto"),
        ({"text": "Nice", "label": 1}, "sft"),
        ({"prompt": "Nice?", "completion": "Yes", "label": 2}, "sft"),
        ({"prompt": "Hi", "chosen": "Hello", "rejected": "Go."}, "dpo"),
        ({"messages": HELLO}, "sft"),
    ],
)
def test_the_columns_say_which_method_rows_are_for(write, row, method):
    from finetune.recipe.complete import complete

    recipe = recipe_from({"model_name_or_path": "tiny", "dataset": write("rows.jsonl", [row]), "method": "auto"})
    chosen, _, reasons = complete(recipe)
    assert chosen.method == method and reasons["method"]
