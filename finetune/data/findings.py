"""Find problems of rows that can be trained on."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.report import Finding, format_locations
from finetune.data.shards import StoredRows

if TYPE_CHECKING:
    from finetune.data.splits import DataSplit, LimitedSplit

_TRUNCATED_SHARE = 0.01  # share of truncated rows from which on they are reported
_MIN_ROWS = 20  # fewest rows for a finding about most rows
_MAX_COMPARED_PAIRS = 20_000  # most pairs that are compared to find contradictions
#: Note on a tokenised row -> its description and fix.
_NOTES = {
    "unrolled": ("the chat template rewrites earlier answers, so each answer is its own sequence, in {rows}", ""),
    "unprompted": (
        "the generation prompt adds text, such as <think>, that the training text lacks, in {rows}",
        "Write the reasoning before the answers, or use a chat_template without it.",
    ),
    "altered": ("the chat template leaves out or changes text, in {rows}", "Look at the example: finetune data RECIPE"),
    "trimmed": (
        "the chat template strips spaces around answers, so the model does not learn these spaces, in {rows}",
        "This matters for code completion: use a model whose template keeps answers unchanged.",
    ),
    "unthinking": (
        "the model can reason before it answers, but the answers have no reasoning, so it learns to skip it, in {rows}",
        "To keep the reasoning, add reasoning_content to the answers.",
    ),
    "endless": (
        "the chat template has no EOS after assistant turns; only the last answer teaches the model to stop, in {rows}",
        "Set chat_template to one that ends each answer with the EOS token.",
    ),
    "ended": ("the chat template writes no token after the last answer, so the EOS token is added, in {rows}", ""),
    "literal": (
        "user texts contain special tokens of the model, which are tokenised as plain text, in {rows}",
        "Remove them if they are left over from a chat template.",
    ),
    "control": (
        "answers, system prompts or plain texts contain special tokens of the model, which stay special tokens, in {rows}",
        "Remove those that the chat template writes itself, such as the EOS token.",
    ),
    "media": (
        "<image>, <video> or <audio> is trained on as text, and no column has such files, in {rows}",
        "Leave those rows out if they ask about a file.",
    ),
    "unknown": (
        "characters that the tokenizer does not know become its unknown token, in {rows}",
        "Choose a model whose tokenizer knows them.",
    ),
}  # fmt: skip


def find_leaks(train: DataSplit, held_out: DataSplit) -> Iterator[Finding]:
    """Yield a finding of held-out rows whose prompt is also trained on."""
    trained_prompts = train.stored.prompt_digests[train.row_mask]  # for plain text the digest covers the whole text
    leaked = held_out.row_mask & np.isin(held_out.stored.prompt_digests, trained_prompts)
    if leaked.any():
        text = "{rows} held out have the prompt of a training row, so their scores say little"
        fix = "Remove them from one of the files, or hold rows out with dataset.test_split_size."
        # a finding blocks a run whose evaluation or training would be worth next to nothing
        blocks = bool(leaked.sum() == held_out.row_mask.sum() >= _MIN_ROWS)
        yield _finding(held_out.stored, "leak", text, leaked, fix, blocks=blocks)


def find_problems(split: LimitedSplit) -> Iterator[Finding]:
    """Yield the findings of one split."""
    stored, used, truncated = split.stored, split.used, split.truncated
    finding = partial(_finding, stored)
    if len(duplicates := stored.exact_duplicates(split.unlimited.row_mask)):
        text = "{rows} are duplicates; they are kept, so they count more than once"
        yield finding("duplicates", text, duplicates, "Remove them unless that is intended.")
    if truncated.sum() > _TRUNCATED_SHARE * used.sum():
        text = f"{{rows}} of {used.sum():,} are cut at max_length, so the model never sees their end"
        with_answer = used & (stored.has("conversation") | stored.has("pair"))
        cuts_all_answers = bool(with_answer.sum() >= _MIN_ROWS) and not (with_answer & ~truncated).any()
        fix = "Raise max_length, or leave them out: excess_length=drop"
        yield finding("truncated", text, truncated, fix, blocks=cuts_all_answers)
    if (rows := used & stored.has("replaced")).any():
        text = "{rows} have U+FFFD, the mark for characters lost in decoding"
        fix = "Regenerate the file with the right encoding."
        yield finding("replaced", text, rows, fix, blocks=bool(2 * rows.sum() > used.sum() >= _MIN_ROWS))
    if stored.are_pairs:
        yield from _pair_findings(stored, used)
    if stored.are_labelled:
        yield from _label_findings(stored, used)
    is_unrolled = stored.sequence_counts > (2 if stored.are_pairs else 1)
    for note, (text, fix) in _NOTES.items():
        rows = used & (is_unrolled if note == "unrolled" else stored.has(note))
        if rows.any():
            yield finding(note, text, rows, fix)


def _pair_findings(stored: StoredRows, used: np.ndarray) -> Iterator[Finding]:
    pairs = np.flatnonzero(used & (stored.sequence_counts == 2))
    # another pair has the same prompt, and the same answers in the other order
    _, prompts, counts = np.unique(stored.prompt_digests[pairs], return_inverse=True, return_counts=True)
    compared = pairs[counts[prompts] > 1][:_MAX_COMPARED_PAIRS]
    preferences = []
    for row in compared:
        chosen, rejected = stored.example(int(row)).pair()
        preferences.append((int(stored.prompt_digests[row]), chosen.reference(), rejected.reference()))
    all_preferences = set(preferences)
    is_contradicted = [(prompt, rejected, chosen) in all_preferences for prompt, chosen, rejected in preferences]
    contradicting = compared[np.array(is_contradicted, dtype=bool)]
    if len(contradicting):
        text = "{rows} contradict another row: it rejects the answer that they prefer"
        fix = "Of each two contradicting rows, keep the correct one."
        yield _finding(stored, "contradictions", text, contradicting, fix, blocks=2 * len(contradicting) > len(pairs))


def _label_findings(stored: StoredRows, used: np.ndarray) -> Iterator[Finding]:
    good = used & ~stored.has("undesirable")
    if not good.any() or good.sum() == used.sum():
        text = f"{{rows}} are all marked {'good' if good.any() else 'bad'}, so there is nothing to compare them with"
        fix = "Add answers of the other kind, or train on good answers alone with  method=sft"
        yield _finding(stored, "one label", text, used, fix, blocks=bool(used.any()))
        return
    rows = np.flatnonzero(used)
    answers = list(zip(stored.prompt_digests[rows].tolist(), stored.answer_digests[rows].tolist(), strict=True))
    labels = set(zip(answers, good[rows].tolist(), strict=True))
    is_both = [(answer, True) in labels and (answer, False) in labels for answer in answers]
    contradicting = rows[np.array(is_both, dtype=bool)]
    if len(contradicting):
        text = "{rows} have an answer marked both good and bad"
        yield _finding(stored, "contradictions", text, contradicting, "Keep one.", blocks=2 * len(contradicting) > len(rows))


def _finding(stored: StoredRows, kind: str, text: str, rows: np.ndarray, fix: str, *, blocks: bool = False) -> Finding:
    # `rows` is a mask or indices; a fourth location shows that there are more than three
    indices = np.flatnonzero(rows) if rows.dtype == bool else rows
    first = format_locations([stored.row_location(index) for index in indices[:4]])
    return Finding(kind, text, len(indices), (first,), fix, blocks)
