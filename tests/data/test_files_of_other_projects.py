"""One row of each shape in which other projects keep clean data: learnt as it is meant, and blocked by nothing."""

import json
from pathlib import Path

import pytest
from small_data import build_tokenizer, prepare, read_examples, recipe

QA = ("Where is it?", "In Lyon.")
TURNS = [{"from": "human", "value": QA[0]}, {"from": "gpt", "value": QA[1]}]
MESSAGES = [{"role": "user", "content": QA[0]}, {"role": "assistant", "content": QA[1]}]
SYSTEM = {"role": "system", "content": "Be brief."}
#: Name of the shape: a row, the system prompt and the turns before the question that it should have.
ROWS = {
    "alpaca": ({"instruction": QA[0], "input": "", "output": QA[1]}, 0),
    "alpaca, with input": ({"instruction": "Where", "input": "is it?", "output": QA[1]}, 0),
    "alpaca, with text": ({"instruction": QA[0], "input": "", "output": QA[1], "text": f"### Q: {QA[0]}\n### A: {QA[1]}"}, 0),
    "alpaca, system and history": (
        {"instruction": QA[0], "input": "", "output": QA[1], "system": "Be brief.", "history": [["Hi", "Hello"]]}, 3,
    ),
    "instructions with response": ({"instruction": QA[0], "response": QA[1]}, 0),
    "instructions with an empty context": ({"instruction": QA[0], "context": "", "response": QA[1], "category": "qa"}, 0),
    "sums": ({"question": QA[0], "answer": QA[1]}, 0),
    "query and response": ({"query": QA[0], "response": QA[1], "type": "x"}, 0),
    "chat": ({"messages": MESSAGES}, 0),
    "chat, with ids": ({"prompt_id": "a1", "messages": MESSAGES, "source": "web"}, 0),
    "chat, with system": ({"messages": [SYSTEM, *MESSAGES]}, 1),
    "fastchat": ({"id": "identity_0", "conversations": TURNS}, 0),
    "sharegpt, system beside it": ({"conversations": TURNS, "system": "Be brief.", "tools": ""}, 1),
    "sharegpt, system as a turn": ({"conversations": [{"from": "system", "value": "Be brief."}, *TURNS]}, 1),
    "roles in sharegpt": ({"conversations": MESSAGES}, 0),
    "xlam with two languages": ({"instruction": QA[0], "output": QA[1], "lang": "fr", "url": "x"}, 0),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_a_clean_row_is_learnt_as_it_is_meant(write, name):
    row, messages_before = ROWS[name]
    report = prepare(recipe(write("rows.jsonl", [row])), build_tokenizer(), max_length=None).report
    assert (report.rows_read, report.rows_used, report.findings) == (1, 1, ())
    [example] = read_examples(recipe(write("rows.json", json.dumps([row]))).dataset).train.examples
    question = example.question()
    assert ("".join(question[-1]["content"].split()), example.reference()) == ("".join(QA[0].split()), QA[1])
    assert len(question) - 1 == messages_before and (messages_before != 1 or question[0] == SYSTEM)


def test_plain_texts_and_prompts_are_learnt_as_they_are(write):
    for row in ({"text": "A page.", "timestamp": "2019", "url": "x"}, {"text": "table: 1\nQ: a\nA: SELECT b"}):
        [example] = read_examples(recipe(write("rows.jsonl", [row])).dataset).train.examples
        assert example.text == row["text"]
    [example] = read_examples(recipe(write("rows.jsonl", [{"prompt": "2+2=", "completion": " 4"}])).dataset).train.examples
    assert (example.prompt, example.completion) == ("2+2=", " 4")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("semicolons.csv", "\ufeffinstruction;output\nWhere is it?;In Lyon.\n"),
        ("lines.csv", '\ufeffinstruction,output\r\nWhere is it?,"In Lyon."\r\n'),
        ("tabs.tsv", "question\tanswer\nWhere is it?\tIn Lyon.\n"),
        ("données é/ligne.jsonl", json.dumps({"question": QA[0], "answer": QA[1]}) + "\r\n"),
    ],
)
def test_tables_line_ends_and_names_in_other_alphabets_are_read(write, tmp_path, name, content):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    path = write(name, content)
    link = tmp_path / f"link{Path(name).suffix}"
    link.symlink_to(path)
    for file_path in (path, str(link)):
        [example] = read_examples(recipe(file_path).dataset).train.examples
        assert (example.messages[0]["content"], example.reference()) == QA


def test_parquet_is_read_as_json_is(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.Table.from_pylist([{"messages": [SYSTEM, *MESSAGES]}]), tmp_path / "rows.parquet")
    [example] = read_examples(recipe(str(tmp_path / "rows.parquet")).dataset).train.examples
    assert example.messages == (SYSTEM, *MESSAGES)
