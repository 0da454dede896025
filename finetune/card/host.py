"""The CPU as a card: training uses host memory, within a container's limit."""

from __future__ import annotations

from pathlib import Path

import psutil

from finetune.card.card import Card
from finetune.units import MIB, format_bytes

#: Resident memory of a process that has torch, transformers, TRL, PEFT and datasets imported (measured, Linux).
PROCESS_BYTES = 800 * MIB


def host_card() -> Card:
    """The CPU as a Card: memory available now, within the container's limit if there is one."""
    memory = psutil.virtual_memory()
    total, free, where = memory.total, memory.available, "this machine"
    limit = _container_limit()
    if limit is not None and limit < total:
        used = _container_used() or 0
        total, free, where = limit, min(free, max(limit - used, 0)), "this container"
    return Card(
        name="cpu", total_bytes=total, free_bytes=free, context_bytes=0, source="cpu",
        reason=f"CPU: {format_bytes(free)} of {format_bytes(total)} host memory available on {where}",
    )  # fmt: skip


def free_for_run() -> int:
    """Bytes of host memory available now, less what a training process needs without a model."""
    return host_card().free_bytes - PROCESS_BYTES


def _container_limit() -> int | None:
    """Bytes of the cgroup's limit; None when there is none (v2 writes `max`, v1 a number near 2^63)."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        value = _number(path)
        if value is not None and value < 2**60:
            return value
    return None


def _container_used() -> int | None:
    for path in ("/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory/memory.usage_in_bytes"):
        value = _number(path)
        if value is not None:
            return value
    return None


def _number(path: str) -> int | None:
    try:
        text = Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
