"""Explains an out-of-memory error: what was asked for, what held the memory, and whether fragmentation is the cause.

A snapshot is what `torch.cuda.memory._snapshot` returns; its format is in that function's docstring. One that is damaged, or of
another version, explains less and is never an error. It is taken after the error was raised: tensors of the failing operator,
and those that the backward pass held, may be free again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from finetune.events import OutOfMemory
from finetune.memory.caching_allocator import SMALL_REQUEST
from finetune.memory.forecast import DRY_RUN_ERROR
from finetune.units import format_bytes

#: Holders that are named.
MOST_HOLDERS = 6


@dataclass(frozen=True)
class FreeMemory:
    """Free blocks of reserved memory, bytes. `usable`: blocks that the request may be given, of its pool and stream."""

    blocks: tuple[int, ...] = ()
    usable: tuple[int, ...] = ()


def free_memory(snapshot: Any, asked_bytes: int | None) -> FreeMemory | None:
    """The free blocks at the time of a snapshot; None when it has no segments.

    torch frees whole cached segments before it gives up, so the remaining free blocks share segments with live ones.
    """
    free, usable = [], []
    streams: Counter[Any] = Counter()
    segments = list(_segments(snapshot))
    for segment in segments:
        streams[str(segment.get("stream"))] += _size(segment, "allocated_size")
    stream = streams.most_common(1)[0][0] if streams else None
    pool = None if asked_bytes is None else "small" if asked_bytes <= SMALL_REQUEST else "large"
    for segment in segments:
        fits = str(segment.get("stream")) == stream and (pool is None or segment.get("segment_type") in (pool, None))
        for block in _blocks(segment):
            size = _size(block, "size")
            if block.get("state") == "inactive" and size:
                free.append(size)
                if fits:
                    usable.append(size)
    return FreeMemory(tuple(sorted(free, reverse=True)), tuple(sorted(usable, reverse=True))) if segments else None


def requested_bytes(snapshot: Any) -> int | None:
    """Bytes of the newest request that failed, to the byte; None unless the allocator's history was recorded."""
    traces = snapshot.get("device_traces") if isinstance(snapshot, dict) else None
    entries = [
        entry
        for trace in (traces if isinstance(traces, (list, tuple)) else ())
        for entry in (trace if isinstance(trace, (list, tuple)) else ())
        if isinstance(entry, dict) and entry.get("action") == "oom" and _size(entry, "size")
    ]
    newest = max(entries, key=lambda entry: _size(entry, "time_us"), default=None)
    return _size(newest, "size") if newest else None


def holders(snapshot: Any) -> dict[str, int]:
    """What holds most of the allocated memory, with its bytes, largest first: the line of code that allocated it where the
    history was recorded, else blocks of one size."""
    holder_bytes: Counter[str] = Counter()
    sizes: Counter[int] = Counter()
    for segment in _segments(snapshot):
        for block in _blocks(segment):
            size = _size(block, "size")
            if block.get("state") != "active_allocated" or not size:
                continue
            if where := _line(block):
                holder_bytes[where] += size
            else:
                sizes[size] += 1
    for size, count in sizes.items():
        holder_bytes[f"{count:,} x {format_bytes(size)}" if count > 1 else f"one of {format_bytes(size)}"] += count * size
    return dict(holder_bytes.most_common(MOST_HOLDERS))


def reservable_bytes(limit_bytes: int | None, reserved_bytes: int | None, card_free_bytes: int | None) -> int | None:
    """Bytes that could still be reserved: within the run's limit, and free on the card; None when neither is known."""
    limits = [card_free_bytes] if card_free_bytes is not None else []
    if limit_bytes is not None and reserved_bytes is not None:
        limits.append(limit_bytes - reserved_bytes)
    return max(0, min(limits)) if limits else None


def explanation(event: OutOfMemory) -> str:
    """Why memory ran out, as one text."""
    return " ".join(explanation_lines(event))


def explanation_lines(event: OutOfMemory) -> list[str]:
    """Why memory ran out: the request, the fragments, the plan's expectation, the largest holders."""
    lines = [_request(event), _fragments(event), _expectation(event)]
    if event.holders:
        named = ", ".join(f"{what} ({format_bytes(size)})" for what, size in event.holders.items())
        lines.append(f"Most of the allocated memory: {named}.")
    return list(filter(None, lines))


def _request(event: OutOfMemory) -> str:
    asked = f"{format_bytes(event.asked_bytes)} were asked for" if event.asked_bytes is not None else "memory ran out"
    phase = f" in phase {event.phase}" if event.phase else ""
    more = f", {format_bytes(event.room_bytes)} more could be reserved" if event.room_bytes is not None else ""
    return f"{asked[0].upper()}{asked[1:]}{phase}{more}."


def _fragments(event: OutOfMemory) -> str:
    free, largest, asked = event.free_bytes, event.largest_free_block_bytes, event.asked_bytes
    if free is None or largest is None or event.free_blocks is None:
        return ""
    free_text = f"{format_bytes(free)} of reserved memory are free, in {event.free_blocks:,} pieces"
    usable = event.largest_usable_block_bytes
    if asked is None:
        return f"{free_text}, the largest {format_bytes(largest)}."
    if event.fragmented:
        return (
            f"Fragmentation: {free_text}, of which the largest that this request may use has {format_bytes(usable or 0)}; "
            "together they would have sufficed. packing=true or rows of similar length reduce it."
        )
    if usable is not None and usable >= asked:
        return f"{free_text}, one of them large enough by now: what failed has been freed since."
    if largest >= asked:
        return f"{free_text}; the largest, {format_bytes(largest)}, belongs to another stream or to small requests."
    return f"{free_text}, too little together." if free else "No reserved memory is free."


def _expectation(event: OutOfMemory) -> str:
    forecast, allocated = event.forecast_allocated_bytes, event.peak_allocated_bytes
    if forecast is None:
        return ""
    expected = f"The plan expected {format_bytes(forecast)} allocated"
    if event.forecast_reserved_bytes is not None:
        expected += f" and {format_bytes(event.forecast_reserved_bytes)} reserved"
    if allocated is None:
        return f"{expected} at most."
    message = f"{expected} at most; {format_bytes(allocated)} were allocated"
    if event.peak_reserved_bytes is not None:
        message += f" and {format_bytes(event.peak_reserved_bytes)} reserved"
    return f"{message}, more than forecast." if allocated > (1 + DRY_RUN_ERROR) * forecast else f"{message} before it failed."


def _segments(snapshot: Any) -> Iterator[dict[str, Any]]:
    segments = snapshot.get("segments") if isinstance(snapshot, dict) else None
    yield from (segment for segment in (segments if isinstance(segments, (list, tuple)) else ()) if isinstance(segment, dict))


def _blocks(segment: dict[str, Any]) -> Iterator[dict[str, Any]]:
    blocks = segment.get("blocks")
    yield from (block for block in (blocks if isinstance(blocks, (list, tuple)) else ()) if isinstance(block, dict))


def _size(values: dict[str, Any], name: str) -> int:
    size = values.get(name)
    return size if isinstance(size, int) and 0 <= size < 2**63 else 0


def _line(block: dict[str, Any]) -> str:
    """File, line and function of Python that allocated a block, outside torch; empty without history."""
    frames = block.get("frames")
    for frame in frames if isinstance(frames, (list, tuple)) else ():
        name = frame.get("filename") if isinstance(frame, dict) else None
        if isinstance(name, str) and name.endswith(".py") and "/torch/" not in name.replace("\\", "/"):
            parts = name.replace("\\", "/").split("/")
            return f"{'/'.join(parts[-2:])}:{frame.get('line')} {frame.get('name')}"
    return ""
