"""The largest micro-batches of a run, as a forecast takes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RowShape:
    """Tokens of the longest row, and the largest share of a micro-batch's positions that count in the loss.

    `mismatched_tokens`: width of a KL batch, whose rows have a prompt and another one's answer; None: as `tokens`.
    `pictures`: width and height of those of the row with most pixels, after `max_pixels`; `eval_pictures` of the held-out row.
    `eval_tokens` and `eval_trained_share`: the same of the held-out rows; as for training where they are not known.
    """

    tokens: int
    trained_share: float = 1.0
    eval_tokens: int | None = None
    eval_trained_share: float | None = None
    mismatched_tokens: int | None = None
    pictures: tuple[tuple[int, int], ...] = ()
    eval_pictures: tuple[tuple[int, int], ...] = ()
