"""What another library's error means for a run; memory that ran out is described as an event."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from finetune.error_kinds import is_disk_full
from finetune.errors import DiskFull, FinetuneError
from finetune.events import Memory, OutOfMemory
from finetune.memory.forecast import PhaseForecast
from finetune.planner.plan import Plan
from finetune.run.card import lost_card
from finetune.run.memory import MemorySampler
from finetune.run.out_of_memory import free_memory, holders, requested_bytes, reservable_bytes
from finetune.run.snapshot import allocator_now


def describe(error: BaseException, phase: str, plan: Plan, memory: MemorySampler) -> OutOfMemory:
    """The event: error text, requested bytes, measured and forecast memory, what held it, and the settings in use."""
    settings, forecast = plan.settings, plan.forecast.of_phase(phase) if plan.forecast else PhaseForecast()
    snapshot, now = allocator_now(not plan.card.is_cpu), memory.sample()
    asked = requested_bytes(snapshot) or _asked_bytes(str(error))
    return OutOfMemory(
        phase=phase, message=str(error).split("\n")[0][:500], asked_bytes=asked,
        micro_batch=settings.per_device_train_batch_size, max_length=settings.max_length,
        forecast_allocated_bytes=forecast.allocated_bytes, forecast_reserved_bytes=forecast.reserved_bytes,
        holders=holders(snapshot), **_free(snapshot, asked, plan, now), **vars(now),
    )  # fmt: skip


def _free(snapshot: dict[str, Any], asked: int | None, plan: Plan, now: Memory) -> dict[str, Any]:
    free = free_memory(snapshot, asked)
    if free is None:
        return {}
    total, used = now.card_total_bytes, now.card_used_bytes
    card_free = None if total is None or used is None else total - used
    reservable = reservable_bytes(plan.usable_bytes - (plan.card.context_bytes or 0), now.reserved_bytes, card_free)
    largest = max(free.usable, default=0)
    enough = asked is not None and sum(free.usable) + (reservable or 0) >= asked
    return {
        "room_bytes": reservable, "free_bytes": sum(free.blocks), "free_blocks": len(free.blocks),
        "largest_free_block_bytes": max(free.blocks, default=0), "largest_usable_block_bytes": largest,
        "fragmented": None if asked is None else enough and max(largest, reservable or 0) < asked,
    }  # fmt: skip


def _asked_bytes(text: str) -> int | None:
    match = re.search(r"[Tt]ried to allocate ([0-9.]+) ([KMG]iB)|you tried to allocate (\d+) bytes", text)
    if not match:
        return None
    if match[3]:
        return int(match[3])
    return round(float(match[1]) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2]])


def cause_of(error: Exception, plan: Plan, run: Path) -> FinetuneError:
    """What another library's error means for the run in this directory, memory apart: a kind of its own is recognised here."""
    if is_disk_full(error):
        return DiskFull(str(error), f"Free some space, then: finetune resume {run}")
    return lost_card(plan, run) or FinetuneError(f"{type(error).__name__}: {error}")
