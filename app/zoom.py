"""Finer bins of a range of steps: reads the parts of events.jsonl that have them, which `Chunks` knows."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from finetune.events import EventReader, Step

from .views.series import Series

#: A chunk begins after so many bytes.
_CHUNK_BYTES = 256 * 2**10
#: Read for one answer; a wider range has the bins of the whole run.
MOST_BYTES = 24 * 2**20


class Chunks:
    """Which steps are between which offsets of a file of events: rows of [offset, lowest step, highest step]."""

    def __init__(self, rows: list[list[int]] | None = None) -> None:
        self.rows = rows or []

    def add(self, offset: int, lowest: int, highest: int) -> None:
        """The events from `offset` on have these steps."""
        if not self.rows or offset - self.rows[-1][0] >= _CHUNK_BYTES:
            self.rows.append([offset, lowest, highest])
        else:
            row = self.rows[-1]
            row[1], row[2] = min(row[1], lowest), max(row[2], highest)

    def of(self, start: int, stop: int, end: int) -> list[tuple[int, int]]:
        """Parts of the file, which ends at `end`, with steps from `start` to `stop`: (offset, bytes)."""
        rows = [*self.rows, [end, 0, 0]]  # another thread may add to them
        return [
            (offset, part_end - offset)
            for (offset, lowest, highest), (part_end, *_) in itertools.pairwise(rows)
            if lowest <= stop and highest >= start
        ]


def finer(path: Path, parts: list[tuple[int, int]], start: int, stop: int, most_bins: int) -> dict[str, Series] | None:
    """The metrics of the steps `start` to `stop`, in at most `most_bins` bins each; None when that is too much to read."""
    if not parts or sum(size for _, size in parts) > MOST_BYTES:
        return None
    series: dict[str, Series] = {}
    for offset, size in parts:
        for event in EventReader(path, offset, {Step.kind: Step}).new(size):
            if isinstance(event, Step) and start <= event.step <= stop:
                for name, value in values_of(event).items():
                    series.setdefault(name, Series(most_bins)).add(event.step, value)
    return series


#: The metrics of each step; a method's own are in `Step.metrics`.
METRICS = (
    "loss", "learning_rate", "grad_norm", "tokens_per_s", "step_s", "token_accuracy", "allocated_bytes", "peak_allocated_bytes",
    "peak_reserved_bytes", "card_used_bytes", "other_processes_bytes", "process_rss_bytes", "process_peak_rss_bytes",
    "temperature_c", "power_w",
)  # fmt: skip


def values_of(event: Step) -> dict[str, Any]:
    """The measured metrics of a step."""
    values = {name: value for name in METRICS if (value := getattr(event, name)) is not None}
    return {**values, **event.metrics}
