"""Held-out loss of each row, at the evaluations of a sweep's arm."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from finetune.files import write_json
from finetune.run.directory import RunDirectory
from finetune.serialise import read_json_as, to_json


@dataclass(frozen=True)
class RowLosses:
    """Held-out losses of an arm after a step; empty where unknown."""

    step: int
    mean: float
    losses: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()


def write_row_losses(run: RunDirectory, step: int, mean: float | None, rows: list[tuple[float, int]]) -> None:
    """Write the loss and trained tokens of each row, and the mean loss over batches. Raises OSError."""
    path = run.path / "evaluations" / f"held-out-{step}.json"
    path.parent.mkdir(exist_ok=True)
    losses, tokens = zip(*rows, strict=True) if rows else ((), ())
    write_json(path, to_json(RowLosses(step, math.nan if mean is None else mean, losses, tokens)))


def read_row_losses(run: RunDirectory) -> list[RowLosses]:
    """Return the saved held-out losses of an arm by step."""
    entries = (read_json_as(path, RowLosses) for path in (run.path / "evaluations").glob("held-out-*.json"))
    return sorted(filter(None, entries), key=lambda entry: entry.step)


def lowest_losses(evaluations: Iterable[RowLosses]) -> RowLosses | None:
    """Return the losses with the lowest finite mean."""
    finite = (losses for losses in evaluations if math.isfinite(losses.mean))
    return min(finite, key=lambda losses: losses.mean, default=None)


@contextlib.contextmanager
def recorded_row_losses(model: Any) -> Iterator[list[tuple[float, int]]]:
    """Yield a list to which each forward pass adds the loss and trained tokens of its rows."""
    rows: list[tuple[float, int]] = []

    def record(_module: Any, _arguments: Any, inputs: dict[str, Any], outputs: Any) -> None:
        # only TRL's loss head returns log_probs
        if getattr(outputs, "log_probs", None) is not None:
            rows.extend(row_losses(outputs, inputs))

    handle = model.register_forward_hook(record, with_kwargs=True)
    try:
        yield rows
    finally:
        handle.remove()


def row_losses(outputs: Any, inputs: dict[str, Any]) -> list[tuple[float, int]]:
    """Return mean loss and trained tokens of each row of a batch."""
    losses, is_trained = -outputs.log_probs.double(), outputs.label_mask
    positions = inputs.get("position_ids")
    if positions is None or positions.shape[0] != 1:  # padded batch: one row per tensor row
        sums, counts = losses.sum(dim=1).tolist(), is_trained.sum(dim=1).tolist()
    else:  # padding-free batch: each row starts at position 0
        starts = (positions[0] == 0).nonzero().flatten().tolist()
        spans = [slice(start, end) for start, end in itertools.pairwise([*starts, losses.shape[1]])]
        sums = [losses[0, span].sum().item() for span in spans]
        counts = [is_trained[0, span].sum().item() for span in spans]
    return [(total / max(1, count), int(count)) for total, count in zip(sums, counts, strict=True)]
