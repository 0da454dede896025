"""Files with one more column, field of messages or split than is read: any name with any kind of value, in any format.

What each is comes from how it is made, not from the library: `meaningful` values differ by row and are text, truth values or
numbers, and the name doesn't say that they are about something else. A file is read rightly if it is stopped with a message
that names the column and with advice that then reads every row, or is trained on with the column named; a meaningful one is
never trained on. Folders, patterns and archives of files named for splits are never trained on held-out rows.
"""

from __future__ import annotations

import json
import random
import re
import shlex
import shutil
import string
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from finetune.data import sources, token_cache  # noqa: E402
from finetune.errors import DataError  # noqa: E402
from finetune.recipe import parse_recipe  # noqa: E402

ROWS = 24
_LISTS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
WORDS, NAMES = _LISTS["words"], _LISTS["names"]
#: Names of what is looked at or heard: an address is no less a part of the question.
MEDIA = {"image_path", "img", "screenshot_url", "photo", "video_file", "audio_path"}
#: Numbers of a class: what is to be learnt, beside plain text.
CLASS_NUMBERS = {"category_id", "topic_id", "type_id"}
#: Names that say what a column is about -> the kinds of values that bear it out; either is right there, if it is named.
ABOUT = {name: {*kinds} for names, kinds in _LISTS["about"] for name in names}
#: Kinds that say themselves that they are about something else, unless the name says that they are an answer.
POINTERS = {"url", "uuid"}


def sentence(generator: random.Random) -> str:
    """A sentence that no other row has."""
    return f"The {' '.join(generator.choices(WORDS, k=7))}."


KINDS = {
    "sentence": lambda generator, row: sentence(generator),
    "paragraph": lambda generator, row: "\n".join(sentence(generator) for _ in range(3)),
    "class": lambda generator, row: ("good", "bad", "unclear")[row % 3],
    "truth": lambda generator, row: row % 2 == 0,
    "truth as text": lambda generator, row: ("True", "False")[row % 2],
    "integer": lambda generator, row: row * 7 % 5,
    "decimal": lambda generator, row: row / 8 + 0.05,
    "list": lambda generator, row: generator.sample(WORDS, 3),
    "object": lambda generator, row: {"first": row, "second": sentence(generator)},
    "verdict inside": lambda generator, row: {"id": row, "label": ("good", "bad")[row % 2]},
    "one row": lambda generator, row: sentence(generator) if row == 5 else None,
    "late flag": lambda generator, row: True if row == ROWS - 1 else None,
    "other script": lambda generator, row: "".join(generator.choices("今天天气很好我们去公园吧", k=12)),
    "url": lambda generator, row: f"https://example.org/{row}",
    "uuid": lambda generator, row: f"{generator.getrandbits(32):08x}-0000-4000-8000-{generator.getrandbits(48):012x}",
    "date": lambda generator, row: f"2024-05-{row + 1:02d}",
    "path": lambda generator, row: f"part_{row}/{''.join(generator.choices(string.ascii_letters, k=9))}.txt",
    "constant": lambda generator, row: "v1",
    "nothing": lambda generator, row: (None, "", [])[row % 3],
}
#: Kinds that are the same in each row, or nothing.
EMPTY = {"constant", "nothing"}


def messages_of(question: str, answer: str) -> list[dict]:
    """A conversation of two turns."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


FORMATS = {
    "messages": lambda question, answer: {"messages": messages_of(question, answer)},
    "sharegpt": lambda question, answer: {
        "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
    },
    "alpaca": lambda question, answer: {"instruction": question, "input": "", "output": answer},
    "question and answer": lambda question, answer: {"question": question, "answer": answer},
    "prompt_completion": lambda question, answer: {"prompt": question, "completion": answer},
    "text": lambda question, answer: {"text": f"{question} {answer}"},
}
FLAGS = {
    "false": lambda row, turn: False, "true once": lambda row, turn: True if (row, turn) == (3, 1) else None,
    "zero": lambda row, turn: 0, "zero on answers": lambda row, turn: 0.0 if turn else None,
    "by turn": lambda row, turn: turn == 1, "by row": lambda row, turn: row % 2 == 0,
    "as text": lambda row, turn: ("false", "true")[row % 2], "note": lambda row, turn: f"The row {row} says no to turn {turn}.",
    "part": lambda row, turn: 0.5 if turn else 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """Rows of one file, the column or field that isn't read, and whether a run on them would be wrong."""

    name: str
    rows: list[dict]
    unread: str
    meaningful: bool


def column_cases(seed: int) -> list[Case]:
    """Each name with each kind of value, in a format chosen by the seed."""
    generator = random.Random(seed)
    cases = []
    for name in NAMES:
        for kind, value in KINDS.items():
            form = generator.choice(list(FORMATS))
            rows = [
                {**FORMATS[form](sentence(generator), sentence(generator)), name: value(generator, row)} for row in range(ROWS)
            ]
            about = kind in ABOUT.get(name, ()) or kind in POINTERS or kind == "date"
            about &= name not in MEDIA and not (name in CLASS_NUMBERS and form == "text" and kind not in POINTERS)
            cases.append(Case(f"{form}, {name}, {kind}", rows, name, not about and kind not in EMPTY))
    return cases


def field_cases(seed: int) -> list[Case]:
    """Each flag on messages, under each name."""
    generator = random.Random(seed)
    cases = []
    for name in _LISTS["flag_names"]:
        for kind, value in FLAGS.items():
            column = generator.choice(["messages", "conversations"])
            rows = []
            for row in range(ROWS):
                turns = messages_of(sentence(generator), sentence(generator))
                rows.append({column: [{**turn, name: value(row, index)} for index, turn in enumerate(turns)]})
            cases.append(Case(f"{column}[].{name}, {kind}", rows, name, True))
    return cases


#: How the files are named in a recipe.
SPLIT_PATHS = ("folder", "pattern", "archive")
SPLITS = ("train", "valid", "validation", "dev", "eval", "test", "training", "heldout")


def split_cases(seed: int) -> list[tuple[str, list[str]]]:
    """How files are named, and their names: two or three splits, sometimes with a file that has no split in its name."""
    generator = random.Random(seed)
    cases = []
    for form in _LISTS["split_forms"]:
        for _ in range(20):
            names = [form.format(name) for name in generator.sample(SPLITS, generator.choice([2, 3]))]
            more = ["more.jsonl"] if generator.random() < 0.2 else []
            cases.append((generator.choice(SPLIT_PATHS), names + more))
    return cases


def typed(fix: str) -> list[list[str]]:
    """The overrides of each line of an error's fix that sets something of the dataset."""
    lines = [shlex.split(line) for line in fix.splitlines() if "dataset." in line]
    overrides = [[word for word in line if re.match(r"dataset\..*=", word)] for line in lines]
    return [line for line in overrides if line]


def read(path: Path | str, overrides: list[str] | tuple[str, ...] = ()) -> tuple[list[Any], ...]:
    """The training rows of a path, as a recipe with these overrides reads them; the refused ones, and the unused columns."""
    recipe = parse_recipe(f"model_name_or_path: tiny\ndataset: {{path: {json.dumps(str(path))}}}\n", "recipe", overrides)
    readers = [token_cache.SourceReader(source, recipe.dataset, None) for source in sources.sources_of(recipe.dataset)[0]]
    batches = [parsed for reader in readers for parsed in reader.parsed()]
    examples = [example for parsed in batches for example in parsed.examples]
    refused = [row for parsed in batches for row in parsed.refused]
    return examples, refused, [column for reader in readers for column in reader.finish()]


def problem_of_case(case: Case, path: Path) -> str:
    """Return the problem of a case: how its file is misread."""
    path.write_text("".join(json.dumps(row) + "\n" for row in case.rows), encoding="utf-8")
    try:
        *_, unused_columns = read(path)
    except DataError as error:
        message = "\n".join(error.problems)
        if case.unread not in message:
            return f"{case.name}: is stopped, and the column isn't named: {message}"
        for overrides in typed(error.fix):
            examples, refused, _ = read(path, overrides)
            if len(examples) != len(case.rows):
                return f"{case.name}: {overrides} refuses rows: {refused[:1]}"
        return ""
    if case.unread not in [name.removeprefix("messages[].") for name in unused_columns]:
        return f"{case.name}: is trained on, and the column isn't named"
    return f"{case.name}: is trained on without asking" if case.meaningful else ""


def problem_of_splits(form: str, names: list[str], folder: Path) -> str:
    """Return the problem of files named for splits: held-out rows must never be trained on."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"text": name}) + "\n", encoding="utf-8")
    path = {"folder": folder, "pattern": folder / "**" / "*.jsonl", "archive": folder.with_suffix(".zip")}[form]
    if form == "archive":
        shutil.make_archive(str(folder), "zip", folder)
    try:
        examples, *_ = read(path)
    except DataError as error:
        return "" if error.fix else f"{form} of {names}: no advice"
    texts = [example.text for example in examples if "train" not in example.text.lower() and example.text != "more.jsonl"]
    return f"{form} of {names}: trains on {texts}" if texts else ""


def problems(columns: list[Case], fields: list[Case], splits: list[tuple[str, list[str]]], folder: Path) -> list[str]:
    """Return the problems of all cases; their files are written below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = [problem_of_case(case, folder / f"{number}.jsonl") for number, case in enumerate([*columns, *fields])]
    texts += [problem_of_splits(*case, folder / f"s{number}") for number, case in enumerate(splits)]
    return [problem for problem in texts if problem]
