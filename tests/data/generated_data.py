"""Files with one more column, field of messages or split than is read: any name with any kind of value, in any format.

What each is comes from how it is made, not from the library: `meaningful` values differ by row and are text, truth values or
numbers, and the name doesn't say that they are about something else.
"""

from __future__ import annotations

import random
import string
from dataclasses import dataclass

ROWS = 24


def listed(text: str) -> list[str]:
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
difficulty tags metadata seed turn name
""")
#: Names that say what a column is about -> the kinds of values that bear it out; either is right there, if it is named.
ABOUT = {
    **dict.fromkeys(listed("id idx index uuid prompt_id conversation_id hash"), {"integer", "uuid", "url", "date", "path"}),
    **dict.fromkeys(listed("source dataset model generator license file path"), {"class", "list", "uuid", "url", "path"}),
    **dict.fromkeys(["url", "link"], {"url", "path", "uuid", "class", "list"}),
    **dict.fromkeys(["lang", "language", "locale"], {"class", "list", "path"}),
    **dict.fromkeys(["date", "created_at", "timestamp", "year"], {"date", "integer", "decimal", "uuid"}),
    **dict.fromkeys(["num_tokens", "length", "count", "turn"], {"integer", "decimal"}),
    **dict.fromkeys(listed("topic type task difficulty tags category"), {"class", "integer", "decimal", "path", "list"}),
    "metadata": {"class", "list", "integer", "decimal", "url", "uuid", "date", "path", "object"},
}
#: Kinds that say themselves that they are about something else, unless the name says that they are an answer.
POINTERS = {"url", "uuid"}


def sentence(generator: random.Random) -> str:
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
en-{}.jsonl data/{}.jsonl data/{}/rows.jsonl {}.final.jsonl A-{}-1.jsonl
""")
SPLITS = ("train", "valid", "validation", "dev", "eval", "test", "training", "heldout")


def split_cases(seed: int) -> list[list[str]]:
    """Names of files in a folder: two or three splits, sometimes with a file that has no split in its name."""
    generator = random.Random(seed)
    cases = []
    for form in SPLIT_FORMS:
        for _ in range(20):
            names = [form.format(name) for name in generator.sample(SPLITS, generator.choice([2, 3]))]
            cases.append(names + (["more.jsonl"] if generator.random() < 0.2 else []))
    return cases
