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

#: Shares of rows from which on they are reported: truncated, with the same answer, with an answer in a rarer script.
_TRUNCATED_SHARE, _SAME_ANSWER_SHARE, _OTHER_SCRIPT_SHARE = 0.01, 0.9, 0.01
_MIN_ROWS = 20  # fewest rows for a finding about most rows, such as equal answers
_LONGER_CHOSEN_SHARE = 0.8  # share of pairs whose chosen answer is longer, from which on the model may learn length
_MAX_COMPARED_PAIRS = 20_000  # most pairs that are compared to find contradictions
#: Range of (weight x number of good answers) / (weight x number of bad answers): KTO's paper, section 4.2, and TRL.
_KTO_BALANCE = 1.0, 4 / 3
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
    trained_prompts = train.stored.prompt_digests[train.row_mask]  # for plain text the digest covers the whole text
    leaked = held_out.row_mask & np.isin(held_out.stored.prompt_digests, trained_prompts)
    if leaked.any():
        text = "{rows} held out have the prompt of a training row, so their scores say little"
        fix = "Remove them from one of the files, or hold rows out with dataset.test_split_size."
        # a finding blocks a run whose evaluation or training would be worth next to nothing
        blocks = bool(leaked.sum() == held_out.row_mask.sum() >= _MIN_ROWS)
        yield _finding(held_out.stored, "leak", text, leaked, fix, blocks=blocks)


def find_problems(split: LimitedSplit, recipe: Recipe, encoder: Encoder) -> Iterator[Finding]:
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
    # the digest of a row without an answer is 0
    answers, counts = np.unique(stored.answer_digests[used & (stored.answer_digests != 0)], return_counts=True)
    if len(counts) and counts.max() >= _MIN_ROWS and counts.max() >= _SAME_ANSWER_SHARE * counts.sum():
        text = f"{{rows}} of {counts.sum():,} have the same answer, so the model will give it to any prompt"
        same_answer = used & (stored.answer_digests == answers[counts.argmax()])
        yield finding("same answer", text, same_answer, "Add rows with other answers.")
    if stored.are_pairs:
        yield from _pair_findings(stored, used)
    if stored.are_labelled:
        yield from _label_findings(stored, used, recipe.desirable_weight or 1.0, recipe.undesirable_weight or 1.0)
    yield from _script_findings(stored, used)
    if encoder.train_on_inputs and (rows := used & stored.has("system")).any():
        text = "the system prompt of {rows} is trained on, too, so the model will generate it"
        yield finding("system", text, rows, "Set train_on_inputs=false.")
    is_unrolled = stored.sequence_counts > (2 if stored.are_pairs else 1)
    for note, (text, fix) in _NOTES.items():
        rows = used & (is_unrolled if note == "unrolled" else stored.has(note))
        if rows.any():
            yield finding(note, text, rows, fix)
    if encoder.template is not None and encoder.template.writes_today:
        text = "the chat template writes today's date into every row, so the tokens change every day"
        yield Finding("today", text, int(used.sum()))


def _script_findings(stored: StoredRows, used: np.ndarray) -> Iterator[Finding]:
    counts = Counter({script: int((used & stored.has(script)).sum()) for script in SCRIPTS})
    (main_script, main_count), *others = counts.most_common()
    if counts.total() - main_count > _OTHER_SCRIPT_SHARE * counts.total():
        listing = ", ".join(f"{count:,} in {script}" for script, count in others if count)
        text = f"answers are in several scripts, most ({main_count:,}) in {main_script}; {{rows}} are not: {listing}"
        rows = used & np.logical_or.reduce([stored.has(script) for script, _ in others])
        fix = "The model will mix them; remove the other rows unless that is intended."
        yield _finding(stored, "languages", text, rows, fix)


def _pair_findings(stored: StoredRows, used: np.ndarray) -> Iterator[Finding]:
    pairs = np.flatnonzero(used & (stored.sequence_counts == 2))
    chosen = stored.sequence_starts[pairs]  # the rejected answer is the next sequence
    longer = pairs[stored.trained_counts[chosen] > stored.trained_counts[chosen + 1]]
    if len(pairs) >= _MIN_ROWS and len(longer) >= _LONGER_CHOSEN_SHARE * len(pairs):
        share = f"{len(longer) / len(pairs):.0%}"
        text = f"the chosen answer is longer in {{rows}} of {len(pairs):,} pairs ({share}), so the model may learn length"
        fix = "Add pairs with a shorter chosen answer, or remove some."
        yield _finding(stored, "length bias", text, longer, fix)
    contradicting = _contradicting(stored, pairs)
    if len(contradicting):
        text = "{rows} contradict another row: it rejects the answer that they prefer"
        fix = "Of each two contradicting rows, keep the correct one."
        yield _finding(stored, "contradictions", text, contradicting, fix, blocks=2 * len(contradicting) > len(pairs))


def _contradicting(stored: StoredRows, pairs: np.ndarray) -> np.ndarray:
    # another pair has the same prompt, and the same answers in the other order
    _, prompts, counts = np.unique(stored.prompt_digests[pairs], return_inverse=True, return_counts=True)
    compared = pairs[counts[prompts] > 1][:_MAX_COMPARED_PAIRS]
    preferences = []
    for row in compared:
        chosen, rejected = stored.example(int(row)).pair()
        preferences.append((int(stored.prompt_digests[row]), chosen.reference(), rejected.reference()))
    all_preferences = set(preferences)
    is_contradicted = [(prompt, rejected, chosen) in all_preferences for prompt, chosen, rejected in preferences]
    return compared[np.array(is_contradicted, dtype=bool)]


def _label_findings(stored: StoredRows, used: np.ndarray, good_weight: float, bad_weight: float) -> Iterator[Finding]:
    bad = used & stored.has("undesirable")
    good = used & ~bad
    n_good, n_bad = int(good.sum()), int(bad.sum())
    if not n_good or not n_bad:
        text = f"{{rows}} are all marked {'good' if n_good else 'bad'}, so there is nothing to compare them with"
        fix = "Add answers of the other kind, or train on good answers alone with  method=sft"
        yield _finding(stored, "one label", text, used, fix, blocks=bool(used.any()))
        return
    ratio = good_weight * n_good / (bad_weight * n_bad)
    lowest, highest = _KTO_BALANCE
    # 1 % more on both ends: the weight in the fix is rounded
    if n_good + n_bad >= _MIN_ROWS and not lowest * 0.99 <= ratio <= highest * 1.01:
        advice = f"the KTO paper advises {lowest:g} to {highest:.2f}"
        text = f"{n_good:,} answers are good and {n_bad:,} bad, weighted {ratio:.2g} to 1; {advice}"
        weight = f"desirable_weight={bad_weight * n_bad / n_good:.3g}"
        if ratio >= 1:
            weight = f"undesirable_weight={good_weight * n_good / n_bad:.3g}"
        yield Finding("label balance", text, fix=f"To balance them:  {weight}")
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
