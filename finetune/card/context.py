"""Measured CUDA contexts of this machine's cards, stored in the cache."""

from __future__ import annotations

import statistics
from pathlib import Path

from finetune.files import cache_dir, read_object, write_json
from finetune.units import GIB, MIB

#: Measurements stored for each card; older ones are dropped.
MOST_MEASUREMENTS = 20
#: Far above anything published: such a measurement includes other programs and is dropped.
MOST_CONTEXT_BYTES = round(1.5 * GIB)
#: A context grows by this much as kernels are loaded: 105 to 141 MiB was measured on a T4.
SPREAD = 40 * MIB


def record_measurement(card_name: str, context_bytes: int) -> None:
    """Record bytes of a CUDA process outside torch's allocator. Raises OSError when the cache can't be written."""
    if context_bytes <= 0:
        raise ValueError(f"context_bytes is {context_bytes}; a CUDA context is never empty")
    if context_bytes > MOST_CONTEXT_BYTES:
        return
    values = _read()
    values[card_name] = [*values.get(card_name, []), context_bytes][-MOST_MEASUREMENTS:]
    path = _path()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, values, checksum=True)


def measured_context(card_name: str) -> tuple[int, int] | None:
    """Median and spread (highest less lowest, at least SPREAD) of the context in bytes; None when never measured."""
    counts = _read().get(card_name)
    if not counts:
        return None
    return int(statistics.median_high(counts)), max(SPREAD, max(counts) - min(counts))


def _path() -> Path:
    return cache_dir() / "contexts.json"


def _read() -> dict[str, list[int]]:
    """Bytes by card; a damaged cache counts as empty, as the next run measures again."""
    return {
        name: counts
        for name, counts in (read_object(_path()) or {}).items()
        if isinstance(counts, list) and all(isinstance(count, int) and count > 0 for count in counts)
    }
