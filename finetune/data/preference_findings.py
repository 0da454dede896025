"""Findings about rows to learn preferences from: pairs of answers, and answers that are marked good or bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.report import Finding

if TYPE_CHECKING:
    from finetune.data.shards import StoredRows

#: Share of pairs whose chosen answer is the longer one, from which on length may be what is learnt.
_LONGER_CHOSEN_SHARE = 0.8
#: Fewest rows of a finding about all rows.
_MIN_ROWS = 20
#: Pairs whose texts are read to find those in the other order.
_MAX_COMPARED = 20_000
#: Weights of all good answers to those of all bad ones that KTO's paper advises (section 4.2), and TRL.
_BALANCE = 1.0, 4 / 3


def preference_findings(
    stored: StoredRows, used: np.ndarray, finding: Callable[..., Finding], label_weights: tuple[float, float]
) -> Iterator[Finding]:
    """What is wrong with pairs or labels; nothing for other rows. `used`: the rows as a mask; `finding` builds one;
    `label_weights`: of good and of bad answers."""
    if stored.are_pairs:
        yield from _pair_findings(stored, used, finding)
    if stored.are_labelled:
        yield from _label_findings(stored, used, finding, label_weights)


def _pair_findings(stored: StoredRows, used: np.ndarray, finding: Callable[..., Finding]) -> Iterator[Finding]:
    pairs = np.flatnonzero(used & (stored.sequence_counts == 2))
    first = stored.sequence_starts[pairs]
    longer = pairs[stored.trained_counts[first] > stored.trained_counts[first + 1]]
    if len(pairs) >= _MIN_ROWS and len(longer) >= _LONGER_CHOSEN_SHARE * len(pairs):
        share = f"{len(longer) / len(pairs):.0%}"
        text = f"the chosen answer is the longer one in {{rows}} of {len(pairs):,} pairs ({share}): the model may learn length"
        yield finding("length bias", text, longer, "Add pairs whose better answer is the shorter one, or leave some out.")
    if len(swapped := _swapped(stored, pairs)):
        text = "{rows} have the answers of another row in the other order: what one prefers the other rejects"
        blocks = 2 * len(swapped) > len(pairs)
        yield finding("contradictions", text, swapped, "Keep the right one of each two.", blocks=blocks)


def _swapped(stored: StoredRows, pairs: np.ndarray) -> np.ndarray:
    """Pairs of which another one with the same prompt has the answers in the other order; among the first ones of the prompts
    with several pairs."""
    _, prompts, counts = np.unique(stored.prompt_digests[pairs], return_inverse=True, return_counts=True)
    compared = pairs[counts[prompts] > 1][:_MAX_COMPARED]
    orders = [(int(stored.prompt_digests[row]), *_answers(stored, int(row))) for row in compared]
    every = set(orders)
    return compared[np.array([(prompt, other, answer) in every for prompt, answer, other in orders], dtype=bool)]


def _answers(stored: StoredRows, row: int) -> tuple[str | None, str | None]:
    chosen, rejected = stored.example(row).pair()
    return chosen.reference(), rejected.reference()


def _label_findings(
    stored: StoredRows, used: np.ndarray, finding: Callable[..., Finding], weights: tuple[float, float]
) -> Iterator[Finding]:
    bad = used & stored.has("undesirable")
    good = used & ~bad
    n_good, n_bad = int(good.sum()), int(bad.sum())
    if not n_good or not n_bad:
        text = f"{{rows}} are all marked {'good' if n_good else 'bad'}: nothing says what the other kind is"
        fix = "Add answers of the other kind. Good answers alone are learnt by  method=sft"
        yield finding("one label", text, used, fix, blocks=bool(used.any()))
        return
    ratio = weights[0] * n_good / (weights[1] * n_bad)
    if n_good + n_bad >= _MIN_ROWS and not _BALANCE[0] * 0.99 <= ratio <= _BALANCE[1] * 1.01:
        text = (
            f"{n_good:,} answers are good and {n_bad:,} bad, which together count {ratio:.2g} to 1; KTO's paper advises "
            f"{_BALANCE[0]:g} to {_BALANCE[1]:.2f}"
        )
        balanced = weights[1] * n_bad / n_good
        fix = f"desirable_weight={balanced:.3g}" if ratio < 1 else f"undesirable_weight={weights[0] * n_good / n_bad:.3g}"
        yield Finding("label balance", text, 0, (), f"To balance them:  {fix}")
    labels: dict[tuple[int, int], set[bool]] = {}
    rows = np.flatnonzero(used)
    keys = [(int(stored.prompt_digests[row]), int(stored.answer_digests[row])) for row in rows]
    for row, key in zip(rows, keys, strict=True):
        labels.setdefault(key, set()).add(bool(good[row]))
    both = rows[np.array([len(labels[key]) > 1 for key in keys], dtype=bool)]
    if len(both):
        blocks = 2 * len(both) > len(rows)
        yield finding("contradictions", "{rows} have an answer that is marked good and bad", both, "Keep one.", blocks=blocks)
