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
    """Write the row losses and their mean over batches. Raises OSError."""
    path = run.path / "evaluations" / f"held-out-{step}.json"
    path.parent.mkdir(exist_ok=True)
    losses, tokens = zip(*rows, strict=True) if rows else ((), ())
    write_json(path, to_json(RowLosses(step, math.nan if mean is None else mean, losses, tokens)))


def row_losses_of(run: RunDirectory) -> list[RowLosses]:
    """Return the saved held-out losses of an arm by step."""
    entries = (read_json_as(path, RowLosses) for path in (run.path / "evaluations").glob("held-out-*.json"))
    return sorted(filter(None, entries), key=lambda entry: entry.step)


def lowest(curve: Iterable[RowLosses]) -> RowLosses | None:
    """Return the lowest finite losses."""
    return min((entry for entry in curve if math.isfinite(entry.mean)), key=lambda entry: entry.mean, default=None)


@contextlib.contextmanager
def recorded_row_losses(model: Any) -> Iterator[list[tuple[float, int]]]:
    """Yield a list that collects the row losses of each forward pass."""
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
    losses, counted = -outputs.log_probs.double(), outputs.label_mask
    positions = inputs.get("position_ids")
    if positions is None or positions.shape[0] != 1:  # padded batch: one row per tensor row
        sums, counts = losses.sum(dim=1).tolist(), counted.sum(dim=1).tolist()
        return [(total / max(1, count), int(count)) for total, count in zip(sums, counts, strict=True)]
    starts = (positions[0] == 0).nonzero().flatten().tolist()  # rows of a padding-free batch
    parts = [
        (losses[0, start:end].sum().item(), int(counted[0, start:end].sum()))
        for start, end in itertools.pairwise([*starts, losses.shape[1]])
    ]
    return [(total / max(1, count), count) for total, count in parts]
