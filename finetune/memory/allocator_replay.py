"""What torch reserves for a run: replays its trace (load, two steps, evaluation) on the simulated caching allocator."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from finetune.card.allocator import AllocatorSettings
from finetune.memory.caching_allocator import CachingAllocator
from finetune.memory.trace import RELEASED, Event, Trace

#: Number of the block that transformers allocates and frees before loading, as large as all weights (caching_allocator_warmup).
WARM_UP = -1


@dataclass(frozen=True)
class Replay:
    """Peaks of a replayed run, bytes. `retries`: how often cached blocks had to be freed to stay within the limit.

    `reserved`, `segments` and `allocated`: peaks by phase (load, train, save, eval); `segments` is empty where they are
    expandable. Allocated are whole blocks: from one of a segment that can't expand torch splits no rest below 1 MiB. The
    retries of the second step, with two micro-batches where gradients accumulate, and of its last micro-batch, each with the
    bytes returned to the driver.
    """

    allocated_bytes: int
    reserved_bytes: int
    retries: int
    reserved: dict[str, int] = field(default_factory=dict)
    segments: dict[str, int] = field(default_factory=dict)
    step_retries: int = 0
    step_returned_bytes: int = 0
    micro_batch_retries: int = 0
    micro_batch_returned_bytes: int = 0
    allocated: dict[str, int] = field(default_factory=dict)


def replay(trace: Trace, *, expandable: bool, limit: int | None = None) -> Replay:
    """The run on a card with this allocator. Raises OutOfMemory when it does not fit `limit`."""
    allocator = CachingAllocator(AllocatorSettings(expandable_segments=expandable), limit=limit)
    run = functools.partial(play, allocator, trace.persistent)
    allocated: dict[str, int] = {}
    reserved: dict[str, int] = {}
    segments: dict[str, int] = {}

    def end(phase: str) -> None:
        """Assign the peaks since the last `end` to `phase`."""
        allocated[phase] = max(allocated.get(phase, 0), allocator.peak_allocated)
        reserved[phase] = max(reserved.get(phase, 0), allocator.peak_reserved)
        segments[phase] = max(segments.get(phase, 0), allocator.peak_segments)
        allocator.reset_peaks()

    run([(WARM_UP, trace.warm_up), (WARM_UP, RELEASED)])
    run(trace.parts["load"])
    end("load")
    allocator.empty_cache()
    first, micro_batches, remaining = _steps(trace)
    for events in first:
        run(events)
    end("train")
    before = micro = (allocator.retries, allocator.returned)
    for events in micro_batches:
        micro = (allocator.retries, allocator.returned)
        run(events)
    micro_retries, micro_returned = allocator.retries - micro[0], allocator.returned - micro[1]
    for events in remaining:
        run(events)
    step_retries, step_returned = allocator.retries - before[0], allocator.returned - before[1]
    end("train")
    for phase in ("save", "eval"):
        if phase in trace.parts:
            run(trace.parts[phase])
            end(phase)
    return Replay(
        max(allocated.values()), max(reserved.values()), allocator.retries, reserved, {} if expandable else segments,
        step_retries, step_returned, micro_retries, micro_returned, allocated,
    )  # fmt: skip


def _steps(trace: Trace) -> tuple[list[list[Event]], list[list[Event]], list[list[Event]]]:
    """Events after loading: the first step, the second one's micro-batches (two where gradients accumulate), its remainder."""
    parts, accumulating = trace.parts, trace.parts["micro-batch"]
    first = first_of_step(accumulating, trace)
    micro = [first, accumulating] if trace.gradients else [first]
    remaining = [parts["clipping"], parts["optimizer"]]
    return [*micro, parts["clipping"], states_of(trace), parts["optimizer"]], micro, remaining


def first_of_step(events: list[Event], trace: Trace) -> list[Event]:
    """A micro-batch's events where it is the first of its step: a new gradient is stored, not added."""
    gradients = trace.gradients
    return [(gradients.get(number, number), size) for number, size in events if size != RELEASED or number not in gradients]


def states_of(trace: Trace) -> list[Event]:
    """Events of what remains after the first optimizer step: the states."""
    events = trace.parts["first step"]
    released = {number for number, size in events if size == RELEASED} | set(trace.gradients.values())
    return [event for event in events if event[0] not in released]


def play(allocator: CachingAllocator, persistent: frozenset[int], events: list[Event]) -> None:
    """Allocate and release. What an earlier replay of the same part left is released when it is allocated again."""
    allocate, release, live = allocator.allocate, allocator.release, allocator.live
    for number, size in events:
        if size == RELEASED:
            if number in live:
                release(number)
        elif number not in live:
            allocate(number, size)
        elif number not in persistent:
            release(number)
            allocate(number, size)
