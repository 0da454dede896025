"""Explain an out-of-memory error: requested bytes, holders of the memory, fragmentation.

A snapshot is a `torch.cuda.memory._snapshot()` after the error: tensors of the failed operator may be free again.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from finetune.events import Memory, OutOfMemory
from finetune.memory.caching_allocator import SMALL_REQUEST
from finetune.memory.forecast import DRY_RUN_ERROR, PhaseForecast
from finetune.units import format_bytes, parse_bytes

if TYPE_CHECKING:  # the chain of imports stays short
    from finetune.planner.plan import Plan

MOST_HOLDERS = 6  # holders in a message


def describe(error: BaseException, phase: str, plan: Plan, now: Memory, snapshot: dict[str, Any]) -> OutOfMemory:
    """Return the event of an out-of-memory error."""
    settings, forecast = plan.settings, plan.forecast.of_phase(phase) if plan.forecast else PhaseForecast()
    asked = requested_bytes(snapshot) or _asked_bytes(str(error))
    return OutOfMemory(
        phase=phase, message=str(error).split("\n")[0][:500], asked_bytes=asked,
        micro_batch=settings.per_device_train_batch_size, max_length=settings.max_length,
        forecast_allocated_bytes=forecast.allocated_bytes, forecast_reserved_bytes=forecast.reserved_bytes,
        holders=holders(snapshot), **_free_memory(snapshot, asked, plan, now), **vars(now),
    )  # fmt: skip


def _free_memory(snapshot: dict[str, Any], asked: int | None, plan: Plan, now: Memory) -> dict[str, Any]:
    # the format of a snapshot is in the docstring of `torch.cuda.memory._snapshot`
    segments = snapshot.get("segments", ())
    if not segments:  # on a CPU
        return {}
    streams = Counter[int]()
    for segment in segments:
        streams[segment["stream"]] += segment["allocated_size"]
    stream = streams.most_common(1)[0][0]
    pool = None if asked is None else "small" if asked <= SMALL_REQUEST else "large"
    blocks, usable = list[int](), [0]
    for segment in segments:
        # torch frees whole cached segments before it gives up: the remaining free blocks share segments with live blocks
        free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        blocks += free
        if segment["stream"] == stream and pool in (None, segment["segment_type"]):
            usable += free
    reservable = plan.usable_bytes - (plan.card.context_bytes or 0) - (now.reserved_bytes or 0)
    if now.card_total_bytes is not None and now.card_used_bytes is not None:
        reservable = min(reservable, now.card_total_bytes - now.card_used_bytes)
    reservable = max(0, reservable)
    enough = asked is not None and sum(usable) + reservable >= asked
    return {
        "room_bytes": reservable, "free_bytes": sum(blocks), "free_blocks": len(blocks),
        "largest_free_block_bytes": max(blocks, default=0), "largest_usable_block_bytes": max(usable),
        "fragmented": None if asked is None else enough and max(*usable, reservable) < asked,
    }  # fmt: skip


def _asked_bytes(text: str) -> int | None:
    match = re.search(r"[Tt]ried to allocate ([0-9.]+ [KMG]iB)|you tried to allocate (\d+) bytes", text)
    return parse_bytes(match[1] or match[2]) if match else None


def requested_bytes(snapshot: dict[str, Any]) -> int | None:
    """Return the exact bytes of the newest failed request; None without recorded history."""
    entries = [entry for trace in snapshot.get("device_traces", ()) for entry in trace if entry["action"] == "oom"]
    return max(entries, key=lambda entry: entry["time_us"])["size"] if entries else None


def holders(snapshot: dict[str, Any]) -> dict[str, int]:
    """Return the largest holders of allocated memory with bytes: code lines, or block sizes without history."""
    holder_bytes: Counter[str] = Counter()
    sizes: Counter[int] = Counter()
    for block in (block for segment in snapshot.get("segments", ()) for block in segment["blocks"]):
        if block["state"] != "active_allocated":
            continue
        if where := _line(block):
            holder_bytes[where] += block["size"]
        else:
            sizes[block["size"]] += 1
    for size, count in sizes.items():
        holder_bytes[f"{count:,} x {format_bytes(size)}" if count > 1 else f"one of {format_bytes(size)}"] += count * size
    return dict(holder_bytes.most_common(MOST_HOLDERS))


def explanation_lines(event: OutOfMemory) -> list[str]:
    """Return the request, the fragments, the plan's expectation and the largest holders."""
    lines = [_request(event), _fragments(event), _expectation(event)]
    if event.holders:
        named = ", ".join(f"{what} ({format_bytes(size)})" for what, size in event.holders.items())
        lines.append(f"Most of the allocated memory: {named}.")
    return list(filter(None, lines))


def _request(event: OutOfMemory) -> str:
    asked = "Memory ran out" if event.asked_bytes is None else f"An allocation of {format_bytes(event.asked_bytes)} failed"
    phase = f" in phase {event.phase}" if event.phase else ""
    more = f", {format_bytes(event.room_bytes)} more could be reserved" if event.room_bytes is not None else ""
    return f"{asked}{phase}{more}."


def _fragments(event: OutOfMemory) -> str:
    free, largest, asked = event.free_bytes, event.largest_free_block_bytes, event.asked_bytes
    if free is None or largest is None or event.free_blocks is None:
        return ""
    free_text = f"{format_bytes(free)} of reserved memory is free in {event.free_blocks:,} pieces"
    usable = event.largest_usable_block_bytes
    if asked is None:
        return f"{free_text}, the largest {format_bytes(largest)}."
    if event.fragmented:
        return (
            f"Fragmentation: {free_text}, and the largest usable piece has {format_bytes(usable or 0)}. "
            "In one piece it would have been enough. packing=true or examples of similar length reduce fragmentation."
        )
    if usable is not None and usable >= asked:
        return f"{free_text}, one of them large enough now, because the failed operation has freed its tensors."
    if largest >= asked:
        return f"{free_text}; the largest, {format_bytes(largest)}, belongs to another stream or to small requests."
    return f"{free_text}, too little in total." if free else "No reserved memory is free."


def _expectation(event: OutOfMemory) -> str:
    forecast, allocated = event.forecast_allocated_bytes, event.peak_allocated_bytes
    if forecast is None:
        return ""
    expected = f"The plan expected {format_bytes(forecast)} allocated{_reserved(event.forecast_reserved_bytes)} at most"
    if allocated is None:
        return f"{expected}."
    end = ", more than forecast" if allocated > (1 + DRY_RUN_ERROR) * forecast else " before it failed"
    return f"{expected}; {format_bytes(allocated)} were allocated{_reserved(event.peak_reserved_bytes)}{end}."


def _reserved(size: int | None) -> str:
    return "" if size is None else f" and {format_bytes(size)} reserved"


def _line(block: dict[str, Any]) -> str:
    # the innermost Python frame outside torch
    for frame in block.get("frames", ()):
        path = frame["filename"].replace("\\", "/")
        if path.endswith(".py") and "/torch/" not in path:
            return f"{'/'.join(path.split('/')[-2:])}:{frame['line']} {frame['name']}"
    return ""
