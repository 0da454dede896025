"""Files with one more column, field of messages or split than is read: any name with any kind of value, in any format.

What each is comes from how it is made, not from the library: `meaningful` values differ by row and are text, truth values or
numbers, and the name doesn't say that they are about something else. A file is read rightly if it is stopped with a message
that names the column and with advice that then reads every row, or is trained on with the column named; a meaningful one is
never trained on. Folders, patterns and archives of files named for splits are never trained on held-out rows.
"""

from __future__ import annotations

import json
import random
import shlex
import string
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from finetune.data.examples import SourceReader, sources_of  # noqa: E402
from finetune.errors import DataError  # noqa: E402
from finetune.recipe import parse_recipe  # noqa: E402

ROWS = 24


def listed(text: str) -> list[str]:
    """The words of a text."""
    return text.split()


WORDS = listed("""
red oak shelf parcel street monday invoice blue river small late paper window seven garden order
""")

NAMES = listed("""
passage document article knowledge evidence table code choices options reference background input_text inputs question2
query2 is_correct correct accepted feedback verdict preferred votes toxicity deleted flagged is_test set subset fold
answer_key correct_index vote_count summary translation target category sentiment hint persona title note extra value
data state status result rank flag quality grade comment output2 final_answer canonical gold expected explanation facts
premise hypothesis sql schema plan Context2 systemPrompt userProfile user_name product price amount total age stars
helpful human_rating preference_score id idx index uuid prompt_id conversation_id hash source dataset model generator
url link lang language locale date created_at timestamp year license file path num_tokens length count topic type task
difficulty tags metadata seed turn name image_path img screenshot_url photo video_file audio_path category_id topic_id type_id
meta properties annotator_label 标签 оценка Étiquette 답변 label_ answer2
""")
#: Names of what is looked at or heard: an address is no less a part of the question.
MEDIA = set(listed("image_path img screenshot_url photo video_file audio_path"))
#: Numbers of a class: what is to be learnt, beside plain text.
CLASS_NUMBERS = set(listed("category_id topic_id type_id"))
#: Names that say what a column is about -> the kinds of values that bear it out; either is right there, if it is named.
ABOUT = {
    **dict.fromkeys(listed("id idx index uuid prompt_id conversation_id hash"), {"integer", "uuid", "url", "date", "path"}),
    **dict.fromkeys(listed("source dataset model generator license file path"), {"class", "list", "uuid", "url", "path"}),
    **dict.fromkeys(["url", "link"], {"url", "path", "uuid", "class", "list"}),
    **dict.fromkeys(["lang", "language", "locale"], {"class", "list", "path"}),
    **dict.fromkeys(["date", "created_at", "timestamp", "year"], {"date", "integer", "decimal", "uuid"}),
    **dict.fromkeys(["num_tokens", "length", "count", "turn"], {"integer", "decimal"}),
    **dict.fromkeys(listed("topic type task difficulty tags category"), {"class", "integer", "decimal", "path", "list"}),
    **dict.fromkeys(["metadata", "meta"], {"class", "list", "integer", "decimal", "url", "uuid", "date", "path", "object"}),
    **dict.fromkeys(CLASS_NUMBERS, {"class", "integer", "decimal", "path", "list", "date"}),
}
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

ASK, REPLY = {"role": "user"}, {"role": "assistant"}


def messages_of(question: str, answer: str) -> list[dict]:
    """A conversation of two turns."""
    return [{**ASK, "content": question}, {**REPLY, "content": answer}]


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
FLAG_NAMES = listed("""
masked ignore learn no_train train_on skip hidden deleted is_correct include use_for_training supervised approved graded
error redacted toxic keep drop loss_mask2 loss_scale factor step_reward penalty bad
""")


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
    for name in FLAG_NAMES:
        for kind, value in FLAGS.items():
            column = generator.choice(["messages", "conversations"])
            rows = []
            for row in range(ROWS):
                turns = messages_of(sentence(generator), sentence(generator))
                rows.append({column: [{**turn, name: value(row, index)} for index, turn in enumerate(turns)]})
            cases.append(Case(f"{column}[].{name}, {kind}", rows, name, True))
    return cases


SPLIT_FORMS = listed("""
{}.jsonl {}-00000-of-00002.jsonl my_{}.jsonl data.{}.jsonl {}_v2.jsonl {}Set.jsonl {}/rows.jsonl {}/part-0.jsonl
en-{}.jsonl data/{}.jsonl data/{}/rows.jsonl {}.final.jsonl A-{}-1.jsonl {}_split/a.jsonl squad_{}_v1.1.jsonl v2/{}-en.jsonl
""")
#: How the files are named in a recipe.
SPLIT_PATHS = ("folder", "pattern", "archive")
SPLITS = ("train", "valid", "validation", "dev", "eval", "test", "training", "heldout")


def split_cases(seed: int) -> list[tuple[str, list[str]]]:
    """How files are named, and their names: two or three splits, sometimes with a file that has no split in its name."""
    generator = random.Random(seed)
    cases = []
    for form in SPLIT_FORMS:
        for _ in range(20):
            names = [form.format(name) for name in generator.sample(SPLITS, generator.choice([2, 3]))]
            more = ["more.jsonl"] if generator.random() < 0.2 else []
            cases.append((generator.choice(SPLIT_PATHS), names + more))
    return cases


def typed(fix: str) -> list[list[str]]:
    """The overrides of each line of an error's fix that sets something of the dataset."""
    lines = [
        [word for word in shlex.split(line) if word.startswith("dataset.")] for line in fix.splitlines() if "dataset." in line
    ]
    return [[word for word in line if "=" in word] for line in lines if any("=" in word for word in line)]


def read(path: Path | str, overrides: list[str] | tuple[str, ...] = ()) -> tuple[list[Any], list[Any], list[str]]:
    """The training rows of a path, as a recipe with these overrides reads them; the refused ones, and the unused columns."""
    recipe = parse_recipe(f"model_name_or_path: tiny\ndataset: {{path: {json.dumps(str(path))}}}\n", "recipe", overrides)
    readers = [SourceReader(source, recipe.dataset, None) for source in sources_of(recipe.dataset)[0]]
    batches = [parsed for reader in readers for parsed in reader.parsed()]
    examples = [example for parsed in batches for example in parsed.examples]
    refused = [row for parsed in batches for row in parsed.refused]
    return examples, refused, [column for reader in readers for column in reader.unused_columns]


def outcome_of_case(case: Case, path: Path) -> tuple[str, str]:
    """What became of a file, `stopped by name`, `trained, named` or `wrong`, and what is wrong."""
    path.write_text("".join(json.dumps(row) + "\n" for row in case.rows), encoding="utf-8")
    try:
        _, _, unused_columns = read(path)
    except DataError as error:
        problem = "\n".join(error.problems)
        if case.unread not in problem:
            return "wrong", f"{case.name}: is stopped, and the column isn't named: {problem}"
        for overrides in typed(error.fix):
            examples, refused, _ = read(path, overrides)
            if len(examples) != len(case.rows):
                return "wrong", f"{case.name}: {overrides} refuses rows: {refused[:1]}"
        return "stopped by name", ""
    if case.unread not in [name.removeprefix("messages[].") for name in unused_columns]:
        return "wrong", f"{case.name}: is trained on, and the column isn't named"
    return ("wrong", f"{case.name}: is trained on without asking") if case.meaningful else ("trained, named", "")


def outcome_of_splits(form: str, names: list[str], folder: Path) -> tuple[str, str]:
    """The same of files named for splits: held-out rows are never trained on."""
    for name in names:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"text": name}) + "\n", encoding="utf-8")
    path = {"folder": folder, "pattern": folder / "**" / "*.jsonl", "archive": folder.with_suffix(".zip")}[form]
    if form == "archive":
        with zipfile.ZipFile(path, "w") as archive:
            for name in names:
                archive.write(folder / name, name)
    try:
        examples, _, _ = read(path)
    except DataError as error:
        return ("stopped by name", "") if error.fix else ("wrong", f"{form} of {names}: no advice")
    texts = [example.text for example in examples if "train" not in example.text.lower() and example.text != "more.jsonl"]
    return ("wrong", f"{form} of {names}: trains on {texts}") if texts else ("trained, named", "")


def outcomes(
    columns: list[Case], fields: list[Case], splits: list[tuple[str, list[str]]], folder: Path
) -> list[tuple[str, str, str]]:
    """Kind of case, what became of it, and what is wrong; the files are written below `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    results = []
    for kind, cases in (("column", columns), ("field of messages", fields)):
        results += [(kind, *outcome_of_case(case, folder / f"{kind[0]}{n}.jsonl")) for n, case in enumerate(cases)]
    return results + [("split", *outcome_of_splits(*case, folder / f"s{n}")) for n, case in enumerate(splits)]
