"""Explain an out-of-memory error: requested bytes, holders of the memory, fragmentation.

A snapshot is a `torch.cuda.memory._snapshot()` after the error, when tensors of the failed operator may be free again.
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


def out_of_memory_event(error: BaseException, phase: str, plan: Plan, memory: Memory, snapshot: dict[str, Any]) -> OutOfMemory:
    """Return the event that explains an error. `memory`: measured after the error."""
    forecast = plan.forecast.of_phase(phase) if plan.forecast else PhaseForecast()
    asked_bytes = _requested_bytes(snapshot) or _bytes_in_message(str(error))
    return OutOfMemory(
        phase=phase, message=str(error).split("\n")[0][:500], asked_bytes=asked_bytes,
        micro_batch=plan.settings.per_device_train_batch_size, max_length=plan.settings.max_length,
        forecast_allocated_bytes=forecast.allocated_bytes, forecast_reserved_bytes=forecast.reserved_bytes,
        holders=holders(snapshot), **_free_memory(snapshot, asked_bytes, plan, memory), **vars(memory),
    )  # fmt: skip


def _free_memory(snapshot: dict[str, Any], asked_bytes: int | None, plan: Plan, memory: Memory) -> dict[str, Any]:
    # the format of a snapshot is in the docstring of `torch.cuda.memory._snapshot`
    segments = snapshot.get("segments", ())
    if not segments:  # on a CPU
        return {}
    bytes_by_stream = Counter[int]()
    for segment in segments:
        bytes_by_stream[segment["stream"]] += segment["allocated_size"]
    main_stream = bytes_by_stream.most_common(1)[0][0]
    pool = "small" if asked_bytes is not None and asked_bytes <= SMALL_REQUEST else "large"
    free_blocks, usable_blocks = list[int](), [0]  # sizes; usable for the failed request, by stream and pool
    for segment in segments:
        # torch frees whole cached segments before it gives up: the remaining free blocks share segments with live blocks
        free_in_segment = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        free_blocks += free_in_segment
        if segment["stream"] == main_stream and (asked_bytes is None or segment["segment_type"] == pool):
            usable_blocks += free_in_segment
    reservable = plan.usable_bytes - (plan.card.context_bytes or 0) - (memory.reserved_bytes or 0)
    if memory.card_total_bytes is not None and memory.card_used_bytes is not None:
        reservable = min(reservable, memory.card_total_bytes - memory.card_used_bytes)
    reservable = max(0, reservable)
    fragmented = None
    if asked_bytes is not None:  # enough in total, but not in one piece
        fragmented = max(*usable_blocks, reservable) < asked_bytes <= sum(usable_blocks) + reservable
    return {
        "room_bytes": reservable, "free_bytes": sum(free_blocks), "free_blocks": len(free_blocks),
        "largest_free_block_bytes": max(free_blocks, default=0), "largest_usable_block_bytes": max(usable_blocks),
        "fragmented": fragmented,
    }  # fmt: skip


def _bytes_in_message(text: str) -> int | None:
    match = re.search(r"[Tt]ried to allocate ([0-9.]+ [KMG]iB)|you tried to allocate (\d+) bytes", text)
    return parse_bytes(match[1] or match[2]) if match else None


def _requested_bytes(snapshot: dict[str, Any]) -> int | None:
    # exact, unlike the error's message; None without recorded history
    failures = [entry for trace in snapshot.get("device_traces", ()) for entry in trace if entry["action"] == "oom"]
    return max(failures, key=lambda entry: entry["time_us"])["size"] if failures else None


def holders(snapshot: dict[str, Any]) -> dict[str, int]:
    """Return bytes by holder, largest first: lines of code, or block sizes where no history was recorded."""
    holder_bytes: Counter[str] = Counter()
    blocks_by_size: Counter[int] = Counter()
    blocks = (block for segment in snapshot.get("segments", ()) for block in segment["blocks"])
    for block in blocks:
        if block["state"] != "active_allocated":
            continue
        if code_line := _code_line(block):
            holder_bytes[code_line] += block["size"]
        else:
            blocks_by_size[block["size"]] += 1
    for size, count in blocks_by_size.items():
        holder_bytes[f"{count:,} x {format_bytes(size)}" if count > 1 else f"one of {format_bytes(size)}"] += count * size
    return dict(holder_bytes.most_common(MOST_HOLDERS))


def explanation_lines(event: OutOfMemory) -> list[str]:
    """Return sentences on the request, the fragments, the plan's expectation and the largest holders."""
    lines = [_request(event), _fragments(event), _expectation(event)]
    if event.holders:
        sizes = ", ".join(f"{holder} ({format_bytes(size)})" for holder, size in event.holders.items())
        lines.append(f"Most of the allocated memory: {sizes}.")
    return list(filter(None, lines))


def _request(event: OutOfMemory) -> str:
    failure = "Memory ran out" if event.asked_bytes is None else f"An allocation of {format_bytes(event.asked_bytes)} failed"
    phase = f" in phase {event.phase}" if event.phase else ""
    reservable = f", {format_bytes(event.room_bytes)} more could be reserved" if event.room_bytes is not None else ""
    return f"{failure}{phase}{reservable}."


def _fragments(event: OutOfMemory) -> str:
    free, largest, asked_bytes = event.free_bytes, event.largest_free_block_bytes, event.asked_bytes
    if free is None or largest is None or event.free_blocks is None:
        return ""
    free_text = f"{format_bytes(free)} of reserved memory is free in {event.free_blocks:,} pieces"
    usable = event.largest_usable_block_bytes
    if asked_bytes is None:
        return f"{free_text}, the largest {format_bytes(largest)}."
    if event.fragmented:
        return (
            f"Fragmentation: {free_text}, and the largest usable piece has {format_bytes(usable or 0)}. "
            "In one piece it would have been enough. packing=true or examples of similar length reduce fragmentation."
        )
    if usable is not None and usable >= asked_bytes:
        return f"{free_text}, one of them large enough now, because the failed operation has freed its tensors."
    if largest >= asked_bytes:
        return f"{free_text}; the largest, {format_bytes(largest)}, belongs to another stream or to small requests."
    return f"{free_text}, too little in total." if free else "No reserved memory is free."


def _expectation(event: OutOfMemory) -> str:
    forecast, allocated = event.forecast_allocated_bytes, event.peak_allocated_bytes
    if forecast is None:
        return ""
    expected = f"The plan expected {format_bytes(forecast)} allocated{_reserved(event.forecast_reserved_bytes)} at most"
    if allocated is None:
        return f"{expected}."
    verdict = ", more than forecast" if allocated > (1 + DRY_RUN_ERROR) * forecast else " before it failed"
    return f"{expected}; {format_bytes(allocated)} were allocated{_reserved(event.peak_reserved_bytes)}{verdict}."


def _reserved(size: int | None) -> str:
    return "" if size is None else f" and {format_bytes(size)} reserved"


def _code_line(block: dict[str, Any]) -> str:
    # the innermost Python frame outside torch
    for frame in block.get("frames", ()):
        path = frame["filename"].replace("\\", "/")
        if path.endswith(".py") and "/torch/" not in path:
            return f"{'/'.join(path.split('/')[-2:])}:{frame['line']} {frame['name']}"
    return ""
