"""A column that isn't read is harmless by its name and its values, or asked about; all are named."""

import pytest
from small_data import advised, build_tokenizer, prepare, read_examples, recipe, talk

from finetune.errors import DataError

SOURCES = ("airoboros 2.2", "EvolInstruct_70k", "cot_alpaca_gpt4")
CATEGORIES = ("closed_qa", "general qa", "writing")


def turns(n):
    return talk(f"Question {n}?", f"Answer {n}.")["messages"]


def shares(n):
    return [{"from": "human", "value": f"Question {n}?"}, {"from": "gpt", "value": f"Answer {n}."}]


def alpaca(n):
    return {"instruction": f"Do {n}", "input": "", "output": f"Done {n}."}


#: Datasets of the hub, by the columns of a row.
PUBLIC = {
    "alpaca": lambda n: {**alpaca(n), "text": f"Below is a task.\n\n### Instruction:\nDo {n}\n\n### Response:\nDone {n}."},
    "oasst-guanaco": lambda n: {"text": f"### Human: Question {n}?### Assistant: Answer {n}."},
    "ultrachat": lambda n: {"prompt": f"Question {n}?", "prompt_id": f"{n:032x}f", "messages": turns(n)},
    "sharegpt": lambda n: {"id": f"kEUiLPg_{n}", "conversations": shares(n), "source": SOURCES[n % 3], "model": ""},
    "dolly": lambda n: {
        "instruction": f"Do {n}", "context": f"About {n}." * (n % 2), "response": f"Done {n}.", "category": CATEGORIES[n % 3],
    },
    "gsm8k": lambda n: {"question": f"Question {n}?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"},
    "tulu": lambda n: {"id": f"oasst1_{n}", "source": "ai2-adapt-dev/oasst1_converted", "messages": turns(n)},
    "no robots": lambda n: {
        "prompt": f"Question {n}?", "prompt_id": f"{n:064x}", "messages": turns(n), "category": CATEGORIES[n % 3],
    },
    "capybara": lambda n: {"source": SOURCES[n % 3], "conversations": shares(n)},
    "numina": lambda n: {
        "source": "cn_k12", "problem": f"Question {n}?", "solution": f"Answer {n}.", "messages": turns(n),
    },
    "a corpus": lambda n: {
        "text": f"Page {n}. It has words.", "id": f"<urn:uuid:{n:08x}-0000-4000-8000-000000000000>", "dump": "CC-MAIN-2024-10",
        "url": f"https://example.org/{n}", "date": f"2024-02-{n + 1:02d}T06:45:18Z", "language": "en", "file_path": f"s3://b/{n}.gz",
        "language_score": 0.9 + n / 100, "token_count": 100 + n,
    },
}  # fmt: skip
#: Those that are asked about, and the columns that are named.
ASKED = {
    "openhermes": (
        lambda n: {
            "custom_instruction": None, "topic": None, "model_name": "gpt-4", "model": None,
            "skip_prompt_formatting": n % 2 == 0, "category": CATEGORIES[n % 3],
            "conversations": shares(n), "views": float(n), "language": "English", "id": f"a{n}",
            "title": f"Title {n}", "idx": n, "hash": n * 7, "avatarUrl": None, "system_prompt": None, "source": SOURCES[n % 3],
        },
        {"skip_prompt_formatting", "views", "title"},
    ),
    "wildchat": (
        lambda n: {"messages": [{**turn, "toxic": False, "language": "English", "turn_identifier": n} for turn in turns(n)]},
        {"toxic"},
    ),
    "metamath": (
        lambda n: {"type": "GSM_Rephrased", "query": f"Say {n}", "original_question": f"Once {n}?", "response": f"Done {n}."},
        {"original_question"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_rows_of_public_datasets_are_read_without_a_question(write, name):
    rows = [PUBLIC[name](n) for n in range(20)]
    split = read_examples(recipe(write("rows.jsonl", rows)).dataset).train
    assert (len(split.examples), split.refused) == (20, [])
    assert "7" in (split.examples[7].text or split.examples[7].reference())


@pytest.mark.parametrize("name", ASKED)
def test_what_may_matter_in_public_datasets_is_one_question_with_its_answer(write, name):
    make, asked = ASKED[name]
    path = write("rows.jsonl", [make(n) for n in range(20)])
    with pytest.raises(DataError) as error:
        read_examples(recipe(path).dataset)
    assert len(error.value.problems) == 1
    settings = advised(error.value.fix)[-1]
    assert set(settings["ignore_columns"]) == asked
    assert len(read_examples(recipe(path, **settings).dataset).train.examples) == 20


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("source", ["The oak shelf is late.", "The red shelf has come."]),
        ("id", ["good", "bad"]),
        ("language", ["Translate it into French, please.", "And this into German."]),
        ("date", ["It was on a Monday.", "It was later."]),
        ("url", [True, False]),
        ("answer_id", [1, 2]),
        ("kommentar", ["nicht gut", "sehr gut"]),
    ],
)
def test_a_harmless_name_with_other_values_is_asked_about(write, name, values):
    path = write("rows.jsonl", [{**alpaca(n), name: values[n % 2]} for n in range(4)])
    with pytest.raises(DataError, match=f"is learnt: {name} "):
        read_examples(recipe(path).dataset)


def test_a_column_that_the_mapping_hides_is_asked_about(write):
    path = write("rows.jsonl", [{"instruction": f"Secret {n}", "question": f"Q {n}", "output": f"A {n}"} for n in range(4)])
    with pytest.raises(DataError, match="is learnt: instruction .text."):
        read_examples(recipe(path, columns={"instruction": "question"}).dataset)


def test_the_last_of_many_rows_can_ask(write):
    rows = [{**alpaca(n), "flagged": True if n == 1_499 else None} for n in range(1_500)]
    with pytest.raises(DataError, match="flagged .truth values"):
        prepare(recipe(write("rows.jsonl", rows)), build_tokenizer(), max_length=None)


def test_constant_empty_and_left_out_columns_are_listed(write):
    rows = [{**alpaca(n), "version": "v1", "note": "", "grade": n, "late": None} for n in range(4)]
    report = prepare(recipe(write("rows.jsonl", rows), ignore_columns=["grade"]), build_tokenizer(), max_length=None).report
    assert report.unused_columns == ("version", "note", "late", "grade")


@pytest.mark.parametrize(
    "flag", [{"masked": True}, {"ignore": True}, {"learn": False}, {"no_train": 1}, {"train_on": False}, {"factor": 0}]
)
def test_a_flag_on_messages_is_asked_about(write, flag):
    path = write("rows.jsonl", [{"messages": [{**turn, **flag} for turn in turns(n)]} for n in range(3)])
    [name] = flag
    with pytest.raises(DataError, match=f"of messages .* is learnt: {name}") as error:
        read_examples(recipe(path).dataset)
    [settings] = advised(error.value.fix)
    assert len(read_examples(recipe(path, **settings).dataset).train.examples) == 3


def test_fields_of_messages_that_are_not_read_are_listed(write):
    path = write("rows.jsonl", [{"messages": [{**turn, "id": f"m{n}_1"} for turn in turns(n)]} for n in range(3)])
    assert read_examples(recipe(path).dataset).train.unused_columns == ("messages[].id",)


def test_texts_that_begin_like_json_stay_texts(write):
    rows = [{"prompt": "[INST] Hi [/INST]", "completion": "{x}"}, {"prompt": '[{"a": 1}]', "completion": '{"b": true}'}]
    split = read_examples(recipe(write("rows.jsonl", rows)).dataset).train
    assert [(example.prompt, example.completion) for example in split.examples] == [tuple(row.values()) for row in rows]
