"""Pairs of answers in the shapes of other tools: the same prompt and answers from each, or one sentence why not."""

import json
import random

import pytest
from small_data import prepare, read_examples, recipe, talk
from test_labels import SHAPES as LABELLED_SHAPES
from test_labels import labelled
from test_nothing_learnt_by_mistake import DPO

from finetune.data.tokens import NOT_TRAINED
from finetune.errors import DataError
from finetune.recipe import recipe_from

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


def pairs(path, **more):
    return recipe_from({"model_name_or_path": "tiny", "dataset": {"path": path, **more}, "method": "dpo"})


@pytest.mark.parametrize("shape", ["implicit", "ranking-alpaca"])
def test_a_row_has_both_answers_and_trains_nothing_of_the_prompt(write, tokenizer, shape):
    longer = {"implicit": talk("Hi", "Hello and welcome")["messages"], "ranking-alpaca": "Hello and welcome"}[shape]
    path = write("rows.jsonl", [SHAPES[shape], {**SHAPES[shape], "chosen": longer}])
    prepared = prepare(pairs(path), tokenizer, max_length=None)
    rows = prepared.train[:]
    assert list(rows) == ["input_ids", "labels", "rejected_input_ids", "rejected_labels"]
    for prefix, answers in (("", ["Hello", "Hello and welcome"]), ("rejected_", ["Go.", "Go."])):
        for ids, labels, answer in zip(rows[f"{prefix}input_ids"], rows[f"{prefix}labels"], answers, strict=True):
            trained = [token for token in labels if token != NOT_TRAINED]
            assert tokenizer.decode(trained, skip_special_tokens=True).strip() == answer
            start = next(index for index, label in enumerate(labels) if label != NOT_TRAINED)
            assert ids[:start] == rows["input_ids"][0][:start]
    assert prepared.lengths == [max(map(len, ids)) for ids in zip(rows["input_ids"], rows["rejected_input_ids"], strict=True)]
    assert prepared.report.total_tokens == sum(map(len, (*rows["input_ids"], *rows["rejected_input_ids"])))


def test_sft_names_the_method_for_pairs_and_dpo_refuses_single_answers(write, tokenizer):
    path = write("rows.jsonl", [SHAPES["implicit"]])
    with pytest.raises(DataError, match=DPO) as error:
        read_examples(recipe(path).dataset)
    assert "method=dpo" in error.value.fix
    with pytest.raises(DataError, match="chosen"):
        prepare(pairs(write("talks.jsonl", [talk("Hi", "Hello")])), tokenizer, max_length=None)


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


@pytest.mark.parametrize(("recipe_of", "shapes"), [(pairs, SHAPES), (labelled, SHAPES | LABELLED_SHAPES)], ids=["dpo", "kto"])
def test_a_damaged_row_is_read_or_refused_in_one_sentence(write, tokenizer, recipe_of, shapes):
    rng, refused = random.Random(0), 0
    for _ in range(200):
        good = rng.choice(list(shapes.values()))
        path = write("rows.jsonl", [good, damaged(good, rng)])
        try:
            prepare(recipe_of(path), tokenizer, max_length=None)
        except DataError as error:
            refused += 1
            assert all(len(problem.splitlines()) == 1 for problem in error.problems), error.problems
    assert 50 < refused < 200
