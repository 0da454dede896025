"""What is worth knowing about rows that can be trained on: what, how many, where first, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.report import Finding, places
from finetune.data.scripts import SCRIPTS
from finetune.data.shards import Stored
from finetune.data.tokenizer import is_replaced

if TYPE_CHECKING:
    from finetune.data.tokens import Encoder

#: Share of truncated rows, and of rows with the same answer, from which it is said.
_CUT, _SAME_ANSWER = 0.01, 0.9
#: Rows from which answers can be called always the same, or all of them damaged, cut or known.
_ENOUGH = 20
#: Share of rows that say nearly the same as an earlier one from which it is said.
_NEAR = 0.01
#: Share of answers in other scripts than the usual one from which it is said.
_MIXED = 0.01
#: Damage in a row's texts -> the same.
_DAMAGE = {
    "replaced": (
        "{rows} have U+FFFD, which stands for characters that were lost when the text was decoded",
        "Make the file again from its source with the right encoding.",
    ),
    "mojibake": (
        "{rows} look like UTF-8 that was read in another encoding, as \u00c3\u00a9 for \u00e9",
        "Make the file again, or repair it with the package ftfy.",
    ),
}
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
        "answers, system prompts or plain texts contain special tokens of the model, and they are tokenised as such, in {rows}",
        "Remove those that the chat template writes itself, such as the EOS token.",
    ),
    "unknown": (
        "characters that the tokenizer does not know become its unknown token, in {rows}",
        "Choose a model whose tokenizer knows them.",
    ),
}  # fmt: skip


def find(
    stored: Stored,
    used: np.ndarray,
    *,
    duplicates: np.ndarray,
    leaked: tuple[int, list[tuple[str, int]]],
    held_out: int,
    truncated: np.ndarray,
    encoder: Encoder,
) -> Iterator[Finding]:
    """The findings of one split. `used`, `truncated`: rows as a mask; `duplicates`: their numbers; `leaked`: how many rows of
    the other split, and the first places; `held_out`: all rows of the other split.

    Those that block say that nearly nothing right can be learnt, or measured, of the data.
    """
    say = _Sayer(stored)
    if leaked[0]:
        text = "{rows} that are held out have the prompt of a training row; their scores say little"
        fix = "Take them out of one of the files, or hold out with dataset.test_split_size."
        yield Finding("leak", text, leaked[0], (places(leaked[1]),), fix, blocks=leaked[0] == held_out >= _ENOUGH)
    if len(duplicates):
        text = "{rows} are duplicates; they are kept, so they count more than once"
        yield say("duplicates", text, duplicates, "Remove them if that isn't meant.")
    alike, compared = stored.near(used)
    if len(alike) > _NEAR * compared:
        among = f" of the first {compared:,}" if compared < used.sum() else ""
        text = f"{{rows}}{among} say nearly the same as an earlier one; what they say counts more than once"
        yield say("near duplicates", text, alike, "Look at some, and remove them if that isn't meant.")
    if truncated.any() and truncated.sum() > _CUT * used.sum():
        text = f"{{rows}} of {used.sum():,} are cut at max_length, and their end is not learnt"
        answers = used & (stored.has("conversation") | stored.has("pair"))
        no_end = bool(answers.sum() >= _ENOUGH) and not (answers & ~truncated).any()
        yield say("truncated", text, truncated, "Raise max_length, or leave them out: excess_length=drop", blocks=no_end)
    for name, (text, fix) in _DAMAGE.items():
        if (rows := used & stored.has(name)).any():
            yield say(name, text, rows, fix, blocks=bool(2 * rows.sum() > used.sum() >= _ENOUGH))
    answers, counts = np.unique(stored.answer[used & (stored.answer != 0)], return_counts=True)
    if len(counts) and counts.max() >= _ENOUGH and counts.max() >= _SAME_ANSWER * counts.sum():
        text = f"{{rows}} of {counts.sum():,} have the same answer, which the model will give to anything"
        same = used & (stored.answer == answers[counts.argmax()])
        yield say("same answer", text, same, "Add rows with other answers.")
    if others := _other_scripts(stored, used):
        text, rows = others
        yield say("languages", text, rows, "The model will mix them; leave the others out if that isn't meant.")
    if encoder.train_on_inputs and (rows := used & stored.has("system")).any():
        text = "the system prompt of {rows} is learnt, too: the model will write it itself"
        yield say("system", text, rows, "Set train_on_inputs=false.")
    if encoder.template is not None and is_replaced(encoder.tokenizer):
        text = "chat_template is not the template that the base model was trained with, in {rows}"
        yield Finding("template", text, int((used & stored.has("conversation")).sum()), (), "")
    for note, (text, fix) in _NOTES.items():
        if (rows := used & (stored.count > 1 if note == "unrolled" else stored.has(note))).any():
            yield say(note, text, rows, fix)
    if encoder.template is not None and encoder.template.writes_today:
        text = "the chat template writes today's date into every row; the same data has other tokens tomorrow"
        yield Finding("today", text, int(used.sum()), (), "")


def _other_scripts(stored: Stored, used: np.ndarray) -> tuple[str, np.ndarray] | None:
    """What to say of the answers that are not in the usual script, and their rows; None where they are few."""
    rows = {name: used & stored.has(name) for name in SCRIPTS}
    counts = {name: int(found.sum()) for name, found in rows.items() if found.any()}
    if not counts:
        return None
    usual = max(counts, key=lambda name: counts[name])
    others = {name: count for name, count in counts.items() if name != usual}
    if sum(others.values()) <= _MIXED * sum(counts.values()):
        return None
    named = ", ".join(f"{count:,} in {name}" for name, count in sorted(others.items(), key=lambda item: -item[1]))
    text = f"answers are in several scripts, most ({counts[usual]:,}) in {usual}: {named}; that is {{rows}}"
    return text, np.logical_or.reduce([rows[name] for name in others])


class _Sayer:
    """Makes findings about rows, with the places of the first three."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def __call__(self, kind: str, text: str, rows: np.ndarray, fix: str, *, blocks: bool = False) -> Finding:
        numbers = np.flatnonzero(rows) if rows.dtype == bool else rows
        return Finding(kind, text, len(numbers), (places([self._stored.place(n) for n in numbers[:4]]),), fix, blocks)
