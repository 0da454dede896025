"""What torch reserves for a run: replays its trace on the simulated caching allocator.

`replay`: load, two steps, evaluation. `replay_widths`: many steps whose micro-batches have different widths, from two dry runs.
A step of another width has the same allocations in the same order, with other sizes. Two traced widths show whether a size is
fixed, linear or quadratic in the width (scores of eager attention, masks of padded rows).
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from finetune.memory.caching_allocator import CachingAllocator
from finetune.memory.trace import RELEASED, Event, NotRepeated, Trace

#: Number of the block that transformers allocates and frees before loading, as large as all weights (caching_allocator_warmup).
WARM_UP = -1
#: Micro-batches that are replayed after the first two steps, and at most in all: fragmentation shows early.
LATER_MICRO_BATCHES, MOST_MICRO_BATCHES = 16, 64
#: Share of a size that a tensor may have less than its tokens.
_FEW_TOKENS = 0.02


@dataclass(frozen=True)
class Replay:
    """Peaks of a replayed run, bytes. `retries`: how often cached blocks had to be freed to stay within the limit.

    `reserved`, `segments` and `allocated`: peaks by phase (load, train, save, eval); `segments` is empty where they are
    expandable. Allocated are whole blocks: from one of a segment that can't expand torch splits no rest below 1 MiB.
    """

    allocated_bytes: int
    reserved_bytes: int
    retries: int
    reserved: dict[str, int] = field(default_factory=dict)
    segments: dict[str, int] = field(default_factory=dict)
    allocated: dict[str, int] = field(default_factory=dict)


def replay(trace: Trace, *, expandable: bool, limit: int | None = None) -> Replay:
    """The run on a card with this allocator. Raises OutOfMemory when it does not fit `limit`."""
    allocator = CachingAllocator(expandable=expandable, limit=limit)
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
    for step in _steps(trace):
        for events in step:
            run(events)
        end("train")
    for phase in ("save", "eval"):
        if phase in trace.parts:
            run(trace.parts[phase])
            end(phase)
    return Replay(
        max(allocated.values()), max(reserved.values()), allocator.retries, reserved, {} if expandable else segments,
        allocated,
    )  # fmt: skip


def _steps(trace: Trace) -> tuple[list[list[Event]], list[list[Event]]]:
    """Events of the first and of the second step, with two micro-batches where gradients accumulate."""
    parts, accumulating = trace.parts, trace.parts["micro-batch"]
    first = first_of_step(accumulating, trace)
    micro = [first, accumulating] if trace.gradients else [first]
    clipping, optimizer = parts["clipping"], parts["optimizer"]
    return [*micro, clipping, states_of(trace), optimizer], [*micro, clipping, optimizer]


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
    """Allocate and release. An allocation left by an earlier replay of the same part is released before the next one."""
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


class MicroBatchEvents:
    """A run's micro-batch at any width, from its traces at two. Raises NotRepeated when these differ in more than sizes.

    Releases keep their places in the wider trace: allocations of a step's graph, released together, have no order.
    """

    def __init__(self, wide: Trace, width: int, narrow: Trace, narrow_width: int) -> None:
        events = wide.parts["micro-batch"]
        sizes = {number: size for number, size in narrow.parts["micro-batch"] if size != RELEASED}
        if [number for number, size in events if size != RELEASED] != list(sizes):
            raise NotRepeated
        self._formulas: list[tuple[int, float, float, float]] = [
            (number, size, 0.0, 0.0) if size == RELEASED else (number, *_formula(size, width, sizes[number], narrow_width))
            for number, size in events
        ]

    def at(self, width: int) -> list[Event]:
        """The events of a micro-batch of this width."""
        square = width * width
        return [(number, round(fixed + linear * width + pair * square)) for number, fixed, linear, pair in self._formulas]


def _formula(size: int, width: int, other: int, narrow: int) -> tuple[float, float, float]:
    """Fixed bytes, bytes for each token, and bytes for each pair of tokens.

    What grows faster than the width is a sum of both: scores with a sink have width * (width + 1) elements. What lacks a few
    tokens, as labels that are shifted do, is still in proportion to the width.
    """
    slope = (size - other) / (width - narrow)
    fixed = size - slope * width
    if fixed >= -_FEW_TOKENS * size:
        return fixed, slope, 0.0
    pair = (size / width - other / narrow) / (width - narrow)
    return 0.0, size / width - pair * width, pair


def micro_batch_widths(lengths: Sequence[int], rows: int, longest: int, accumulation: int, seed: int = 0) -> list[int]:
    """Widths of the first micro-batches, each padded to its longest row. As in a run, a step's rows are random and sorted.

    Widths fall in the first step, from the second longest row, and rise in later steps; the longest row ends step 2.
    """
    rng, padded_lengths = random.Random(seed), sorted(min(length, longest) for length in lengths)
    count, batch = min(MOST_MICRO_BATCHES, 2 * accumulation + LATER_MICRO_BATCHES), rows * accumulation
    widths: list[int] = []
    for step in range(-(-count // accumulation)):
        drawn = rng.choices(padded_lengths, k=batch)
        if step < 2:
            drawn[0] = padded_lengths[-2:][step]
        drawn.sort(reverse=step == 0)
        widths += [max(drawn[start : start + rows]) for start in range(0, batch, rows)]
    return widths[:count]


def replay_widths(
    trace: Trace, micro_batches: MicroBatchEvents, widths: Sequence[int], accumulation: int, *, expandable: bool
) -> int:
    """Return the peak of reserved bytes up to the end of these micro-batches, `accumulation` to a step, in unlimited memory."""
    allocator = CachingAllocator(expandable=expandable)
    run = functools.partial(play, allocator, trace.persistent)
    run([(WARM_UP, trace.warm_up), (WARM_UP, RELEASED)])
    run(trace.parts["load"])
    allocator.empty_cache()
    for begin in range(0, len(widths), accumulation):
        for index, width in enumerate(widths[begin : begin + accumulation]):
            events = micro_batches.at(width)
            run(events if index else first_of_step(events, trace))
        run(trace.parts["clipping"])
        if not begin:
            run(states_of(trace))
        run(trace.parts["optimizer"])
    return allocator.peak_reserved
