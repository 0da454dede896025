"""Find problems of rows that can be trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.report import Finding, format_locations
from finetune.data.shards import SCRIPTS, StoredRows
from finetune.data.tokens import Encoder
from finetune.settings import Recipe

if TYPE_CHECKING:
    from finetune.data.splits import DataSplit, LimitedSplit

#: Smallest shares of rows that are reported: truncated, with the same answer, and with an answer in another
#: script than most.
_TRUNCATED_SHARE, _SAME_ANSWER_SHARE, _OTHER_SCRIPT_SHARE = 0.01, 0.9, 0.01
#: Fewest rows of a finding about all rows, such as that all answers are equal or damaged.
_MIN_ROWS = 20
#: Share of pairs with the longer answer chosen, from which on the model may learn length.
_LONGER_CHOSEN_SHARE = 0.8
#: Pairs whose texts are read to find those in the other order.
_MAX_COMPARED = 20_000
#: Range of the weight of all good answers over all bad answers, as KTO's paper (section 4.2) and TRL advise.
_BALANCE = 1.0, 4 / 3
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
    "placeholder": (
        "placeholders such as {{{{name}}}} are trained on literally, in {rows}",
        "Fill them in, unless the rows are about templates.",
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
    # for plain text the digest covers the whole text
    trained_prompts = train.stored.prompt_digests[train.row_mask]
    rows = held_out.row_mask & np.isin(held_out.stored.prompt_digests, trained_prompts)
    if rows.any():
        text = "{rows} held out have the prompt of a training row, so their scores say little"
        fix = "Remove them from one of the files, or hold rows out with dataset.test_split_size."
        # findings block where the evaluation measures, or the data teaches, next to nothing
        blocks = bool(rows.sum() == held_out.row_mask.sum() >= _MIN_ROWS)
        yield _finding(held_out.stored, "leak", text, rows, fix, blocks=blocks)


def find_problems(split: LimitedSplit, recipe: Recipe, encoder: Encoder) -> Iterator[Finding]:
    """Yield the findings of one split."""
    stored, used, truncated = split.stored, split.used, split.truncated
    finding = partial(_finding, stored)
    if len(duplicates := stored.exact_duplicates(split.unlimited.row_mask)):
        text = "{rows} are duplicates; they are kept, so they count more than once"
        yield finding("duplicates", text, duplicates, "Remove them unless that is intended.")
    if truncated.sum() > _TRUNCATED_SHARE * used.sum():
        text = f"{{rows}} of {used.sum():,} are cut at max_length, so the model never sees their end"
        answers = used & (stored.has("conversation") | stored.has("pair"))
        no_end = bool(answers.sum() >= _MIN_ROWS) and not (answers & ~truncated).any()
        fix = "Raise max_length, or leave them out: excess_length=drop"
        yield finding("truncated", text, truncated, fix, blocks=no_end)
    if (rows := used & stored.has("replaced")).any():
        text = "{rows} have U+FFFD, the mark for characters lost in decoding"
        fix = "Regenerate the file with the right encoding."
        yield finding("replaced", text, rows, fix, blocks=bool(2 * rows.sum() > used.sum() >= _MIN_ROWS))
    answers, counts = np.unique(stored.answer_digests[used & (stored.answer_digests != 0)], return_counts=True)
    if len(counts) and counts.max() >= _MIN_ROWS and counts.max() >= _SAME_ANSWER_SHARE * counts.sum():
        text = f"{{rows}} of {counts.sum():,} have the same answer, so the model will give it to any prompt"
        same_answer = used & (stored.answer_digests == answers[counts.argmax()])
        yield finding("same answer", text, same_answer, "Add rows with other answers.")
    if stored.are_pairs:
        yield from _pair_findings(stored, used)
    if stored.are_labelled:
        yield from _label_findings(stored, used, (recipe.desirable_weight or 1.0, recipe.undesirable_weight or 1.0))
    yield from _script_findings(stored, used)
    if encoder.train_on_inputs and (rows := used & stored.has("system")).any():
        text = "the system prompt of {rows} is trained on, too, so the model will generate it"
        yield finding("system", text, rows, "Set train_on_inputs=false.")
    for note, (text, fix) in _NOTES.items():
        if (rows := used & (stored.sequence_counts > 1 + stored.are_pairs if note == "unrolled" else stored.has(note))).any():
            yield finding(note, text, rows, fix)
    if encoder.template is not None and encoder.template.writes_today:
        text = "the chat template writes today's date into every row, so the tokens change every day"
        yield Finding("today", text, int(used.sum()), (), "")


def _script_findings(stored: StoredRows, used_mask: np.ndarray) -> Iterator[Finding]:
    counts = Counter({name: int((used_mask & stored.has(name)).sum()) for name in SCRIPTS})
    (main_script, main_count), *others = counts.most_common()
    others = [(name, count) for name, count in others if count]
    if counts.total() - main_count > _OTHER_SCRIPT_SHARE * counts.total():
        listing = ", ".join(f"{count:,} in {name}" for name, count in others)
        text = f"answers are in several scripts, most ({main_count:,}) in {main_script}; {{rows}} are not: {listing}"
        rows = used_mask & np.logical_or.reduce([stored.has(name) for name, _ in others])
        fix = "The model will mix them; remove the other rows unless that is intended."
        yield _finding(stored, "languages", text, rows, fix)


def _pair_findings(stored: StoredRows, used: np.ndarray) -> Iterator[Finding]:
    pairs = np.flatnonzero(used & (stored.sequence_counts == 2))
    first = stored.sequence_starts[pairs]
    longer = pairs[stored.trained_counts[first] > stored.trained_counts[first + 1]]
    if len(pairs) >= _MIN_ROWS and len(longer) >= _LONGER_CHOSEN_SHARE * len(pairs):
        share = f"{len(longer) / len(pairs):.0%}"
        text = f"the chosen answer is longer in {{rows}} of {len(pairs):,} pairs ({share}), so the model may learn length"
        fix = "Add pairs with a shorter chosen answer, or remove some."
        yield _finding(stored, "length bias", text, longer, fix)
    if len(swapped := _swapped(stored, pairs)):
        text = "{rows} contradict another row: it rejects the answer that they prefer"
        blocks = 2 * len(swapped) > len(pairs)
        yield _finding(
            stored, "contradictions", text, swapped, "Of each two contradicting rows, keep the correct one.", blocks=blocks
        )


def _swapped(stored: StoredRows, pairs: np.ndarray) -> np.ndarray:
    _, prompts, counts = np.unique(stored.prompt_digests[pairs], return_inverse=True, return_counts=True)
    compared = pairs[counts[prompts] > 1][:_MAX_COMPARED]
    pairs_of_texts = [[answer.reference() for answer in stored.example(int(row)).pair()] for row in compared]
    orders = [(int(stored.prompt_digests[row]), *texts) for row, texts in zip(compared, pairs_of_texts, strict=True)]
    every = set(orders)
    return compared[np.array([(prompt, other, answer) in every for prompt, answer, other in orders], dtype=bool)]


def _label_findings(stored: StoredRows, used: np.ndarray, weights: tuple[float, float]) -> Iterator[Finding]:
    bad = used & stored.has("undesirable")
    good = used & ~bad
    n_good, n_bad = int(good.sum()), int(bad.sum())
    if not n_good or not n_bad:
        text = f"{{rows}} are all marked {'good' if n_good else 'bad'}, so there is nothing to compare them with"
        fix = "Add answers of the other kind, or train on good answers alone with  method=sft"
        yield _finding(stored, "one label", text, used, fix, blocks=bool(used.any()))
        return
    ratio = weights[0] * n_good / (weights[1] * n_bad)
    if n_good + n_bad >= _MIN_ROWS and not _BALANCE[0] * 0.99 <= ratio <= _BALANCE[1] * 1.01:
        text = (
            f"{n_good:,} answers are good and {n_bad:,} bad, weighted {ratio:.2g} to 1; the KTO paper advises "
            f"{_BALANCE[0]:g} to {_BALANCE[1]:.2f}"
        )
        balanced = weights[1] * n_bad / n_good
        fix = f"desirable_weight={balanced:.3g}" if ratio < 1 else f"undesirable_weight={weights[0] * n_good / n_bad:.3g}"
        yield Finding("label balance", text, 0, (), f"To balance them:  {fix}")
    rows = np.flatnonzero(used)
    keys = list(zip(stored.prompt_digests[rows].tolist(), stored.answer_digests[rows].tolist(), strict=True))
    labelled = set(zip(keys, good[rows].tolist(), strict=True))
    both = rows[np.array([labelled.issuperset(((key, True), (key, False))) for key in keys], dtype=bool)]
    if len(both):
        blocks = 2 * len(both) > len(rows)
        text = "{rows} have an answer marked both good and bad"
        yield _finding(stored, "contradictions", text, both, "Keep one.", blocks=blocks)


def _finding(stored: StoredRows, kind: str, text: str, rows: np.ndarray, fix: str, *, blocks: bool = False) -> Finding:
    indices = np.flatnonzero(rows) if rows.dtype == bool else rows
    first = format_locations([stored.row_location(index) for index in indices[:4]])
    return Finding(kind, text, len(indices), (first,), fix, blocks)
