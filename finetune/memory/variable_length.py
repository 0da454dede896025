"""What torch reserves over many steps whose micro-batches have different widths, from two dry runs.

A step of another width has the same allocations in the same order, with other sizes. Two traced widths show whether a size is
fixed, linear or quadratic in the width (scores of eager attention, masks of padded rows).
"""

from __future__ import annotations

import contextlib
import functools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from finetune.card.allocator import AllocatorSettings
from finetune.memory.allocator_replay import WARM_UP, first_of_step, play, states_of
from finetune.memory.caching_allocator import CachingAllocator, OutOfMemory
from finetune.memory.trace import RELEASED, Event, NotRepeated, Trace

#: Micro-batches that are replayed after the first two steps, and at most in all: fragmentation shows early.
LATER_MICRO_BATCHES, MOST_MICRO_BATCHES = 16, 64


@dataclass(frozen=True)
class Growth:
    """Peaks of a run with these widths, bytes, and what was reserved at the end of each step.

    `retries`: how often cached blocks had to be freed to stay within the limit; `returned_bytes`: bytes returned to the driver
    after loading.
    """

    allocated_bytes: int
    reserved_bytes: int
    by_step: tuple[int, ...]
    retries: int = 0
    returned_bytes: int = 0


class MicroBatchEvents:
    """A run's micro-batch at any width, from its traces at two. Raises NotRepeated when these differ in more than sizes.

    Releases stand where the wider trace has them: what is released at once, such as a step's graph, has no order.
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


#: Share of a size that a tensor may have less than its tokens.
_FEW_TOKENS = 0.02


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

    The first step runs from the second longest of all down, the others up; the longest of all ends step 2.
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
    trace: Trace,
    micro_batches: MicroBatchEvents,
    widths: Sequence[int],
    accumulation: int,
    settings: AllocatorSettings,
    *,
    limit: int | None = None,
    most: float = math.inf,
) -> Growth | None:
    """The run up to the end of these micro-batches, `accumulation` to a step. Without a limit: in unlimited memory.

    None as soon as more than `most` bytes are reserved, or when the run does not fit `limit`.
    """
    with contextlib.suppress(OutOfMemory):
        allocator = CachingAllocator(settings, limit=limit)
        run = functools.partial(play, allocator, trace.persistent)
        run([(WARM_UP, trace.warm_up), (WARM_UP, RELEASED)])
        run(trace.parts["load"])
        allocator.empty_cache()
        if settings.warm_up_bytes:
            run([(WARM_UP, settings.warm_up_bytes), (WARM_UP, RELEASED)])
            allocator.reset_peaks()
        loaded = allocator.returned
        by_step = []
        for begin in range(0, len(widths), accumulation):
            for index, width in enumerate(widths[begin : begin + accumulation]):
                events = micro_batches.at(width)
                run(events if index else first_of_step(events, trace))
                if allocator.peak_reserved > most:
                    return None
            run(trace.parts["clipping"])
            if not begin:
                run(states_of(trace))
            run(trace.parts["optimizer"])
            by_step.append(allocator.reserved)
        returned = allocator.returned - loaded
        return Growth(allocator.peak_allocated, allocator.peak_reserved, tuple(by_step), allocator.retries, returned)
    return None
