"""What is worth knowing about rows that can be trained on: what, how many, where first, and what to do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from finetune.data.formats import Example
from finetune.data.report import Finding, places

#: Share of truncated rows, and of rows with the same answer, from which it is said.
_CUT, _SAME_ANSWER = 0.01, 0.9
#: Rows from which answers can be called always the same.
_ENOUGH = 20
#: UTF-8 that was read as Windows-1252 or Latin-1: an accented letter, a quotation mark, an emoji.
_MOJIBAKE = re.compile(
    "\u00c3[\u0080-\u00bf\u0152\u0153\u0160\u0161\u017d\u017e\u2018-\u203a]|\u00e2\u20ac[\u0080-\u00bf\u2122\u0153\u201c\u201d\u00a6]|\u00f0\u0178"
)
_REPLACED = "\ufffd"

#: Note of a tokenised row -> what it means and what to do.
_NOTES = {
    "unrolled": ("the chat template changes answers as the conversation goes on, so each is its own sequence, in {rows}", ""),
    "unprompted": (
        "the generation prompt has text, such as <think>, that is not in the training text, in {rows}",
        "Write the reasoning before the answers, or use a chat_template without it.",
    ),
    "altered": ("the chat template leaves out or changes text, in {rows}", "Look at the example: finetune data RECIPE"),
    "endless": (
        "the chat template has no EOS after assistant turns; only the last answer teaches the model to stop, in {rows}",
        "Set chat_template to one that ends each answer with the EOS token.",
    ),
    "literal": (
        "a user's text contains special tokens of the model; they are read as plain text, never as those tokens, in {rows}",
        "Remove them if they are left over from a chat template.",
    ),
    "control": (
        "answers or system prompts contain special tokens of the model, and they are tokenised as such, in {rows}",
        "Remove those that the chat template writes itself, such as the EOS token.",
    ),
    "unknown": (
        "characters that the tokenizer does not know become its unknown token, in {rows}",
        "Choose a model whose tokenizer knows them.",
    ),
}  # fmt: skip


def find(
    used: list[Example],
    noted: dict[str, list[Example]],
    *,
    duplicates: list[Example],
    leaked: list[Example],
    truncated: list[Example],
    writes_today: bool,
) -> Iterator[Finding]:
    """The findings of one split. `noted`: rows by the note that tokenising them left."""
    if leaked:
        text = "{rows} that are held out have the prompt of a training row; their scores say little"
        yield _finding("leak", text, leaked, "Take them out of one of the files, or hold out with dataset.test_split_size.")
    if duplicates:
        text = "{rows} are duplicates; they are kept, so they count more than once"
        yield _finding("duplicates", text, duplicates, "Remove them if that isn't meant.")
    if used and len(truncated) > _CUT * len(used):
        text = f"{{rows}} of {len(used):,} are cut at max_length, and their end is not learnt"
        yield _finding("truncated", text, truncated, "Raise max_length, or leave them out: excess_length=drop")
    yield from _about_texts(used)
    for note, (text, fix) in _NOTES.items():
        if noted.get(note):
            yield _finding(note, text, noted[note], fix)
    if writes_today:
        text = "the chat template writes today's date into every row; the same data has other tokens tomorrow"
        yield Finding("today", text, len(used), (), "")


def _about_texts(used: list[Example]) -> Iterator[Finding]:
    damaged = [example for example in used if any(_REPLACED in text for text in example.texts())]
    if damaged:
        text = "{rows} have U+FFFD, which stands for characters that were lost when the text was decoded"
        yield _finding("replaced", text, damaged, "Make the file again from its source with the right encoding.")
    misread = [example for example in used if any(_MOJIBAKE.search(text) for text in example.texts())]
    if misread:
        text = "{rows} look like UTF-8 that was read in another encoding, as \u00c3\u00a9 for \u00e9"
        yield _finding("mojibake", text, misread, "Make the file again, or repair it with the package ftfy.")
    answers = Counter(answer.strip() for example in used if (answer := example.reference()) is not None)
    [(answer, count)] = answers.most_common(1) or [("", 0)]
    if count >= _ENOUGH and count >= _SAME_ANSWER * answers.total():
        same = [example for example in used if (example.reference() or "").strip() == answer]
        text = f"{{rows}} of {answers.total():,} have the same answer, which the model will give to anything"
        yield _finding("same answer", text, same, "Add rows with other answers.")


def _finding(kind: str, text: str, rows: list[Example], fix: str) -> Finding:
    return Finding(kind, text, len(rows), (places([(row.file, row.row) for row in rows]),), fix)
