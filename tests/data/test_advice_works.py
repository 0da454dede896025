"""What an error says to type is typed, on the file that caused it: the rows are then read, and as they are meant."""

import json
import shlex
import shutil
import subprocess

import pytest
from small_data import advised, build_tokenizer, prepare, read_examples, recipe

from finetune.errors import DataError

ORDER = '{{"name": "shelf {n}"}}'
#: Name -> a row by number (as a template), and the answer that the first suggestion should teach.
FILES = {
    "text and output": ({"text": "Send shelf {n}.", "output": ORDER}, ORDER),
    "text and summary": ({"text": "Shelf {n} is here.", "summary": "A shelf {n}."}, "A shelf {n}."),
    "text and sentiment": ({"text": "Shelf {n} is here.", "sentiment": "good {n}"}, "good {n}"),
    "content and summary": ({"content": "Shelf {n} is here.", "summary": "A shelf {n}."}, "A shelf {n}."),
    "dialogue and summary": ({"dialogue": "A: Is it shelf {n}?", "summary": "A shelf {n}."}, "A shelf {n}."),
    "input and output": ({"input": "Shelf {n}?", "output": "Yes {n}."}, "Yes {n}."),
    "problem and solution": ({"problem": "Shelf {n}?", "solution": "Yes {n}."}, "Yes {n}."),
    "request and response": ({"request": "Shelf {n}?", "response": "Yes {n}."}, "Yes {n}."),
    "user and assistant": ({"user": "Shelf {n}?", "assistant": "Yes {n}."}, "Yes {n}."),
    "source and target": ({"source": "Shelf {n}?", "target": "Yes {n}."}, "Yes {n}."),
    "instruction and answer": ({"instruction": "Shelf {n}?", "answer": "Yes {n}."}, "Yes {n}."),
    "prompt and output": ({"prompt": "Shelf {n}?", "output": "Yes {n}."}, "Yes {n}."),
    "article and highlights": ({"article": "Shelf {n}.", "highlights": "A shelf {n}."}, "A shelf {n}."),
    "in capitals": ({"Question": "Shelf {n}?", "Answer": "Yes {n}."}, "Yes {n}."),
    "with spaces": ({" Instruction ": "Shelf {n}?", "Output ": "Yes {n}."}, "Yes {n}."),
    "any two names": ({"frage 1": "Shelf {n}?", "yes: or no": "Yes {n}."}, "Yes {n}."),
    "a passage": ({"question": "Where?", "answer": "Here {n}.", "passage": "Shelf {n} is here."}, "Here {n}."),
    "a context": ({"query": "Where?", "response": "Here {n}.", "context": "Shelf {n} is here."}, "Here {n}."),
    "chosen and rejected": ({"prompt": "Shelf {n}?", "chosen": "Yes {n}.", "rejected": "No.", "margin": "{n}.5"}, "Yes {n}."),
    "two dialogues": ({"chosen": "\n\nHuman: Shelf {n}?\n\nAssistant: Yes.", "rejected": "\n\nHuman: Shelf?"}, None),
    "a conversation of pairs": (
        {"system": "Be brief {n}.", "conversation": [{"human": "Shelf {n}?", "assistant": "Yes {n}."}]}, "Yes {n}.",
    ),
    "turns under another name": ({"dialog": [{"role": "user", "content": "{n}?"}, {"role": "bot", "content": "{n}."}]}, "{n}."),
    "two sentences": (
        {"sentence1": "Is it shelf {n}?", "sentence2": "It is shelf {n}.", "label": "yes {n}", "source": "web"}, "yes {n}",
    ),
    "a system prompt": (
        {"system_message": "Be number {n}.", "messages": [
            {"role": "user", "content": "{n}?"}, {"role": "assistant", "content": "{n}."}]}, "{n}.",
    ),
}  # fmt: skip


def filled(value, n):
    if isinstance(value, str):
        return value.format(n=n)
    return {k: filled(v, n) for k, v in value.items()} if isinstance(value, dict) else [filled(item, n) for item in value]


@pytest.mark.parametrize("name", FILES)
def test_each_suggestion_reads_the_file_that_caused_it(write, name):
    row, answer = FILES[name]
    path = write("rows.jsonl", [filled(row, n) for n in range(12)])
    with pytest.raises(DataError) as error:
        read_examples(recipe(path).dataset)
    suggestions = advised(error.value.fix)
    for settings in suggestions:
        rows = read_examples(recipe(path, **settings).dataset).train
        assert (len(rows.examples), rows.refused) == (12, [])
    first = read_examples(recipe(path, **suggestions[0]).dataset).train.examples[3]
    assert first.reference() == (answer and answer.format(n=3))
    whole = f"{first.question()}{first.text or ''}{first.reference()}"
    assert "3" in whole and not any("suggest" in str(text) for text in first.texts())


@pytest.mark.parametrize("answer", [{"name": "Bob", "items": [1, 2]}, 7, 2.5, True, ["a", "b"]])
def test_answers_that_are_not_text_are_written_as_json_when_asked(write, answer):
    path = write("rows.jsonl", [{"instruction": f"Read {n}", "output": answer} for n in range(3)])
    with pytest.raises(DataError, match="not text") as error:
        prepare(recipe(path), build_tokenizer(), max_length=None)
    [settings] = [settings for settings in advised(error.value.fix) if "json_columns" in settings]
    rows = read_examples(recipe(path, **settings).dataset).train
    assert [json.loads(example.reference()) for example in rows.examples] == [answer] * 3


def test_content_of_messages_is_written_as_json_when_asked(write):
    messages = [{"role": "user", "content": "Read it"}, {"role": "assistant", "content": {"name": "Bob", "note": "ü"}}]
    path = write("rows.jsonl", [{"messages": messages}])
    with pytest.raises(DataError, match="is an object, not text") as error:
        prepare(recipe(path), build_tokenizer(), max_length=None)
    assert {"json_columns": ["content"]} in advised(error.value.fix)
    [example] = read_examples(recipe(path, json_columns=["content"]).dataset).train.examples
    assert example.reference() == '{"name": "Bob", "note": "ü"}'


@pytest.mark.skipif(shutil.which("jq") is None, reason="the advice calls jq")
def test_the_command_for_seed_tasks_makes_rows(write, tmp_path):
    instances = [{"input": "oak", "output": "table"}, {"input": "", "output": "chair"}]
    path = write("seeds.jsonl", [{"id": "seed_0", "instruction": "Name it", "instances": instances}])
    with pytest.raises(DataError) as error:
        read_examples(recipe(path).dataset)
    subprocess.run(error.value.fix.partition("  ")[2], shell=True, check=True, cwd=tmp_path)
    assert len(read_examples(recipe(str(tmp_path / "rows.jsonl")).dataset).train.examples) == 2


@pytest.mark.skipif(shutil.which("jq") is None, reason="the advice calls jq")
@pytest.mark.parametrize(("name", "good", "bad"), [("label", True, False), ("label", 1, 0), ("kto_tag", True, False)])
def test_the_command_for_labelled_answers_keeps_the_good_ones(write, tmp_path, name, good, bad):
    rows = [{"prompt": f"Shelf {n}?", "completion": f"Yes {n}.", name: good if n % 2 else bad} for n in range(6)]
    with pytest.raises(DataError) as error:
        read_examples(recipe(write("my rows.jsonl", rows)).dataset)
    (command,) = (line for line in error.value.fix.splitlines() if " jq " in line)
    subprocess.run(command.partition("  ")[2], shell=True, check=True, cwd=tmp_path)
    examples = read_examples(recipe(str(tmp_path / "good.jsonl")).dataset).train.examples
    assert [example.prompt for example in examples] == ["Shelf 1?", "Shelf 3?", "Shelf 5?"]


@pytest.mark.parametrize("split", ["validation", "dev", "test"])
def test_the_setting_for_a_column_of_splits_holds_those_rows_out(write, split):
    path = write(
        "rows.jsonl", [{"prompt": f"{n}?", "completion": "Yes.", "split": "train" if n < 5 else split} for n in range(8)]
    )
    with pytest.raises(DataError) as error:
        read_examples(recipe(path).dataset)
    rows = read_examples(recipe(path, **advised(error.value.fix)[0]).dataset)
    assert (len(rows.train.examples), len(rows.eval.examples)) == (5, 3)


def test_advice_leaves_out_no_second_text(write):
    path = write(
        "rows.jsonl", [{"sentence1": f"Is it {n}?", "sentence2": f"It is {n + 1}.", "label": n % 2} for n in range(12)]
    )
    with pytest.raises(DataError) as error:
        read_examples(recipe(path).dataset)
    first = read_examples(recipe(path, **advised(error.value.fix)[0]).dataset).train.examples[3]
    assert (first.question()[0]["content"], first.reference()) == ("Is it 3?\n\nIt is 4.", "1")


def test_names_that_yaml_or_a_shell_would_change_are_quoted():
    from finetune.data.column_advice import override
    from finetune.recipe import parse_recipe

    values: dict = {}
    columns = {"instruction": " a: [b], {c} ", "output": "it's #1", "input": "true"}
    for typed in (override("columns", columns), override("ignore_columns", list(columns.values()))):
        values |= advised(typed)[0]
        [argument] = shlex.split(typed)
        assert parse_recipe("model: tiny\ndataset: a.jsonl", overrides=[argument])
    assert values == {"columns": columns, "ignore_columns": list(columns.values())}
