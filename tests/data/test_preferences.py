"""Pairs of answers and answers marked good or bad (KTO), in the shapes of other tools, also damaged."""

import json
import random

import pytest
from small_data import prepare

from finetune.errors import DataError
from finetune.recipe import recipe_from
from finetune.recipe.complete import complete

HELLO, GO = ([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}] for answer in ("Hello", "Go."))
ASK = [{"from": "human", "value": "Hi"}]
#: TRL with the prompt in the answers, and apart; UltraFeedback; LLaMA-Factory's two; Anthropic's transcripts; JSON in text.
SHAPES = {
    "implicit": {"chosen": HELLO, "rejected": GO},
    "explicit": {"prompt": HELLO[:1], "chosen": HELLO[1:], "rejected": GO[1:]},
    "ultrafeedback": {"prompt": "Hi", "chosen": HELLO, "rejected": GO},
    "ranking-sharegpt": {
        "conversations": ASK, "chosen": {"from": "gpt", "value": "Hello"}, "rejected": {"from": "gpt", "value": "Go."},
    },
    "ranking-alpaca": {"instruction": "Hi", "input": "", "chosen": "Hello", "rejected": "Go."},
    "axolotl": {"messages": HELLO[:1], "chosen": HELLO[1], "rejected": GO[1]},
    "transcripts": {"chosen": "\n\nHuman: Hi\n\nAssistant: Hello", "rejected": "\n\nHuman: Hi\n\nAssistant: Go."},
    "json": {"prompt": HELLO[:1], "chosen": json.dumps(HELLO[1:]), "rejected": json.dumps(GO[1:])},
}  # fmt: skip

LABELLED_SHAPES = {
    "trl": {"prompt": HELLO[:1], "completion": HELLO[1:], "label": True},
    "messages": {"messages": HELLO, "label": "true"},
    "sharegpt": {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "label": 1},
    "alpaca": {"instruction": "Hi", "input": "", "output": "Hello", "label": 1.0},
}


def damaged(value, rng):
    """The value with one part of it left out or replaced."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not keys or rng.random() < 0.2:
        return rng.choice([None, "", " ", 7, -0.5, 1e400, True, [], {}, [None], [[]], {"role": "user"}, "[{", "\n\nHuman: Hi"])
    key, copied = rng.choice(keys), value.copy()
    if rng.random() < 0.2:
        del copied[key]
    else:
        copied[key] = damaged(value[key], rng)
    return copied


@pytest.mark.parametrize(("method", "shapes"), [("dpo", SHAPES), ("kto", SHAPES | LABELLED_SHAPES)])
def test_a_damaged_row_is_read_or_refused_in_one_sentence(write, tokenizer, method, shapes):
    rng, refused = random.Random(0), 0
    for _ in range(200):
        good = rng.choice(list(shapes.values()))
        path = write("rows.jsonl", [good, damaged(good, rng)])
        try:
            recipe = recipe_from({"model_name_or_path": "tiny", "dataset": path, "method": method})
            prepare(recipe, tokenizer, max_length=None)
        except DataError as error:
            refused += 1
            assert all(len(problem.splitlines()) == 1 for problem in error.problems), error.problems
    assert 50 < refused < 200


@pytest.mark.parametrize(
    ("row", "method"),
    [
        (LABELLED_SHAPES["trl"], "kto"),
        ({"text": "Nice", "label": 1}, "sft"),
        ({"prompt": "Nice?", "completion": "Yes", "label": 2}, "sft"),
        ({"prompt": "Hi", "chosen": "Hello", "rejected": "Go."}, "dpo"),
        ({"messages": HELLO}, "sft"),
    ],
)
def test_the_columns_say_which_method_rows_are_for(write, row, method):
    recipe = recipe_from({"model_name_or_path": "tiny", "dataset": write("rows.jsonl", [row]), "method": "auto"})
    chosen, _, reasons = complete(recipe)
    assert chosen.method == method and reasons["method"]
