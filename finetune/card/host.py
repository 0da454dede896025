"""The CPU as a Card, with a container's memory limit."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from finetune.card.card import Card
from finetune.units import MIB, format_bytes

#: Resident memory of a process after importing torch, transformers, TRL, PEFT and datasets (measured on Linux).
PROCESS_BYTES = 800 * MIB


def host_card() -> Card:
    """Return the CPU as a Card."""
    memory = psutil.virtual_memory()
    total, free, location = memory.total, memory.available, "this machine"
    limit = _cgroup("memory.max", "memory/memory.limit_in_bytes")  # v2 writes `max` for none, v1 a number near 2^63
    if limit is not None and limit < total:
        used = _cgroup("memory.current", "memory/memory.usage_in_bytes") or 0
        total, free, location = limit, min(free, max(limit - used, 0)), "this container"
    return Card(
        name="cpu", total_bytes=total, free_bytes=free, context_bytes=0, source="cpu",
        reason=f"CPU: {format_bytes(free)} of {format_bytes(total)} host memory available on {location}",
    )  # fmt: skip


def free_for_run() -> int:
    """Return the free host memory less PROCESS_BYTES."""
    return host_card().free_bytes - PROCESS_BYTES


def _cgroup(*names: str) -> int | None:
    for name in names:
        with contextlib.suppress(OSError):
            text = (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip()
            if text.isdigit():
                return int(text)
    return None
