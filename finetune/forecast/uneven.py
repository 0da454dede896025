"""What torch reserves over many steps whose micro-batches have different widths: one dry run more, and no other.

A step of another width has the same allocations in the same order, with other sizes. Of two traced widths each size is known to
be fixed, linear or a square of the width (scores of eager attention, masks of padded rows).
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from finetune.forecast.caching_allocator import CachingAllocator, OutOfMemory
from finetune.forecast.reserved import WARM_UP, Player, states_of
from finetune.forecast.trace import RELEASED, Event, NotRepeated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from finetune.card.allocator import AllocatorSettings
    from finetune.forecast.trace import Trace


#: Micro-batches that are replayed after the first two steps, and at most in all: what fragments does so at once.
LATER_MICRO_BATCHES, MOST_MICRO_BATCHES = 16, 64


@dataclass(frozen=True)
class Growth:
    """Peaks of a run with these widths, bytes, and what was reserved at the end of each step.

    `retries`: how often cached blocks had to be freed to stay within the limit; `returned_bytes`: what went back to the driver
    after loading.
    """

    allocated_bytes: int
    reserved_bytes: int
    by_step: tuple[int, ...]
    retries: int = 0
    returned_bytes: int = 0


class Widths:
    """A run's micro-batch at any width, from its traces at two. Raises NotRepeated when these differ in more than sizes.

    Releases stand where the wider trace has them: what is released at once, such as a step's graph, has no order.
    """

    def __init__(self, wide: Trace, width: int, narrow: Trace, narrow_width: int) -> None:
        events = wide.parts["micro-batch"]
        sizes = {number: size for number, size in narrow.parts["micro-batch"] if size != RELEASED}
        if [number for number, size in events if size != RELEASED] != list(sizes):
            raise NotRepeated
        self._known: list[tuple[int, float, float, float]] = [
            (number, size, 0.0, 0.0) if size == RELEASED else (number, *_formula(size, width, sizes[number], narrow_width))
            for number, size in events
        ]

    def at(self, width: int) -> list[Event]:
        """The events of a micro-batch of this width."""
        square = width * width
        return [(number, round(fixed + each * width + pair * square)) for number, fixed, each, pair in self._known]


def _formula(size: int, width: int, other: int, narrow: int) -> tuple[float, float, float]:
    """Fixed bytes, bytes for each token, and bytes for each pair of tokens."""
    if size == other:
        return size, 0.0, 0.0
    if size * narrow * narrow == other * width * width:
        return 0.0, 0.0, size / (width * width)
    slope = (size - other) / (width - narrow)
    return size - slope * width, slope, 0.0


def widths_of(lengths: Sequence[int], rows: int, longest: int, accumulation: int, seed: int = 0) -> list[int]:
    """Widths of the first micro-batches, each padded to its longest row. As in a run a step's rows are random ones, sorted.

    The first step runs from the second longest of all down, the others up; the longest of all ends step 2.
    """
    rng, known = random.Random(seed), sorted(min(length, longest) for length in lengths)
    count, batch = min(MOST_MICRO_BATCHES, 2 * accumulation + LATER_MICRO_BATCHES), rows * accumulation
    widths: list[int] = []
    for step in range(-(-count // accumulation)):
        drawn = rng.choices(known, k=batch)
        if step < 2:
            drawn[0] = known[-2:][step]
        drawn.sort(reverse=step == 0)
        widths += [max(drawn[start : start + rows]) for start in range(0, batch, rows)]
    return widths[:count]


def replay_uneven(
    trace: Trace,
    known: Widths,
    widths: Sequence[int],
    accumulation: int,
    settings: AllocatorSettings,
    *,
    limit: int | None = None,
    most: float = math.inf,
) -> Growth | None:
    """The run up to the end of these micro-batches, `accumulation` to a step. Without a limit: what it would like to reserve.

    None as soon as more than `most` bytes are reserved, or when the run does not fit `limit`.
    """
    try:
        return _replay_uneven(trace, known, widths, accumulation, settings, limit, most)
    except OutOfMemory:
        return None


def _replay_uneven(
    trace: Trace,
    known: Widths,
    widths: Sequence[int],
    accumulation: int,
    settings: AllocatorSettings,
    limit: int | None,
    most: float,
) -> Growth | None:
    allocator = CachingAllocator(settings, limit=limit)
    player = Player(allocator, trace.kept)
    player.play([(WARM_UP, trace.warm_up), (WARM_UP, RELEASED)])
    player.play(trace.parts["load"])
    allocator.empty_cache()
    if settings.warm_up_bytes:
        player.play([(WARM_UP, settings.warm_up_bytes), (WARM_UP, RELEASED)])
        allocator.reset_peaks()
    loaded = allocator.returned
    gradients, parts = trace.gradients or {}, trace.parts
    by_step = []
    for begin in range(0, len(widths), accumulation):
        for place, width in enumerate(widths[begin : begin + accumulation]):
            events = known.at(width)
            if place == 0:  # a new gradient is kept, not added
                events = [
                    (gradients.get(number, number), size) for number, size in events if size >= 0 or number not in gradients
                ]
            player.play(events)
            if allocator.peak_reserved > most:
                return None
        player.play(parts["clipping"])
        if not begin:
            player.play(states_of(trace))
        player.play(parts["optimizer"])
        by_step.append(allocator.reserved)
    returned = allocator.returned - loaded
    return Growth(allocator.peak_allocated, allocator.peak_reserved, tuple(by_step), allocator.retries, returned)
