"""Pairs of answers in the shapes of other tools: the same prompt and answers from each, or one sentence why not."""

import json
import random

import pytest
from small_data import prepare, read_examples, recipe, talk
from test_labels import SHAPES as LABELLED_SHAPES
from test_labels import labelled
from test_nothing_learnt_by_mistake import DPO

from finetune.data.formats import parse
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


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_is_the_same_pair(shape):
    example = parse(SHAPES[shape], "preference", {}, "rows.jsonl", 1)
    assert [answer.question()[-1]["content"] for answer in example.pair()] == ["Hi", "Hi"]
    assert [answer.reference() for answer in example.pair()] == ["Hello", "Go."]


def test_texts_stay_texts():
    example = parse({"prompt": "Q: 1+1?", "chosen": " 2", "rejected": " 3"}, "preference", {}, "rows.jsonl", 1)
    assert [(answer.prompt, answer.completion) for answer in example.pair()] == [("Q: 1+1?", " 2"), ("Q: 1+1?", " 3")]


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


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "Hi", "chosen": "Yes", "rejected": " Yes"}, "are equal"),
        ({"chosen": HELLO, "rejected": HELLO}, "are equal"),
        ({"chosen": HELLO, "rejected": [{"role": "user", "content": "Other"}, GO[1]]}, "differ in the prompt"),
        ({"prompt": "Bye", "chosen": HELLO, "rejected": GO}, "its prompt is not the row's"),
        ({"chosen": "Hello", "rejected": "Go."}, "without a prompt"),
        ({"chosen": HELLO[1:], "rejected": GO[1:]}, "no prompt"),
        ({"prompt": "Hi", "chosen": "", "rejected": "Go."}, "empty"),
        ({"prompt": "Hi", "chosen": None, "rejected": "Go."}, "missing"),
        ({"chosen": [*HELLO, HELLO[0]], "rejected": HELLO}, "what follows"),
    ],
)
def test_what_is_no_pair_is_refused_by_its_row(write, tokenizer, row, reason):
    path = write("rows.jsonl", [SHAPES["implicit"] if "prompt" not in row else SHAPES["ultrafeedback"], row])
    with pytest.raises(DataError, match=f"(?s)row 2.*{reason}"):
        prepare(pairs(path), tokenizer, max_length=None)


def test_sft_names_the_method_for_pairs_and_dpo_refuses_single_answers(write, tokenizer):
    path = write("rows.jsonl", [SHAPES["implicit"]])
    with pytest.raises(DataError, match=DPO) as error:
        read_examples(recipe(path).dataset)
    assert "method=dpo" in error.value.fix
    with pytest.raises(DataError, match="chosen"):
        prepare(pairs(write("talks.jsonl", [talk("Hi", "Hello")])), tokenizer, max_length=None)


def test_chosen_answers_that_are_nearly_always_longer_are_a_finding(write, tokenizer):
    def kinds(longer):
        answers = [("Yes, that is so", "No")] * longer + [("No", "Yes, that is so")] * (30 - longer)
        rows = [
            {"instruction": f"Is {n} odd?", "chosen": chosen, "rejected": rejected}
            for n, (chosen, rejected) in enumerate(answers)
        ]
        report = prepare(pairs(write("rows.jsonl", rows)), tokenizer, max_length=None).report
        return [(finding.kind, finding.rows) for finding in report.findings if finding.kind == "length bias"]

    assert kinds(longer=27) == [("length bias", 27)]
    assert kinds(longer=20) == []


def test_columns_by_other_names_are_mapped(write, tokenizer):
    row = {"question": "Hi", "response_j": "Hello", "response_k": "Go."}
    columns = {"instruction": "question", "chosen": "response_j", "rejected": "response_k"}
    prepared = prepare(pairs(write("rows.jsonl", [row]), columns=columns), tokenizer, max_length=None)
    assert prepared.examples[0].reference() == "Hello"


def test_pairs_in_both_orders_contradict_each_other(write, tokenizer):
    rows = [{"prompt": f"Question {n}", "chosen": "Yes", "rejected": "No"} for n in range(3)]
    path = write("rows.jsonl", [*rows, rows[0] | {"chosen": "No", "rejected": "Yes"}])
    prepared = prepare(pairs(path), tokenizer, max_length=None)
    assert [(finding.kind, finding.rows) for finding in prepared.report.findings if finding.kind == "contradictions"] == [
        ("contradictions", 2)
    ]


def test_answers_that_are_cut_to_the_same_are_refused(write, tokenizer):
    long = "and so on " * 20
    rows = [
        {"prompt": "Q", "chosen": f" {long}yes", "rejected": f" {long}no"},
        {"prompt": "Q", "chosen": " a", "rejected": " b"},
    ]
    path = write("rows.jsonl", rows)
    truncated = pairs(path).model_copy(update={"excess_length": "truncate"})
    assert len(prepare(truncated, tokenizer, max_length=None).train) == 2
    with pytest.raises(DataError, match="cut to the same"):
        prepare(truncated, tokenizer, max_length=32)


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
