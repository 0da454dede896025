"""Reserved memory of a run: its trace replayed on the simulated caching allocator."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from finetune.memory.caching_allocator import CachingAllocator
from finetune.memory.trace import RELEASED, Event, NotRepeated, Trace

#: Number of the block, as large as all weights, that transformers' caching_allocator_warmup allocates and frees before loading.
WARM_UP = -1
#: Micro-batches replayed after the first two steps, and at most in total: fragmentation shows early.
LATER_MICRO_BATCHES, MAX_MICRO_BATCHES = 16, 64
#: A size is linear in the width if it is smaller than proportional by at most this share: shifted labels lack one token.
_LINEAR_TOLERANCE = 0.02


@dataclass(frozen=True)
class Replay:
    """Peaks of a replayed run by phase: load, train, save, eval."""

    #: Bytes of whole blocks: outside expandable segments, large blocks keep a remainder of up to 1 MiB.
    allocated: dict[str, int]
    #: Bytes.
    reserved: dict[str, int]
    #: Number of segments; empty where they are expandable.
    segments: dict[str, int] = field(default_factory=dict)

    @property
    def reserved_bytes(self) -> int:
        return max(self.reserved.values())


def replay(trace: Trace, *, expandable: bool, limit: int | None = None) -> Replay:
    """Replay load, two steps, save and evaluation. Raises OutOfMemory beyond `limit` reserved bytes."""
    allocator = CachingAllocator(expandable=expandable, limit=limit)
    allocated, reserved, segments = dict[str, int](), dict[str, int](), dict[str, int]()

    def record_peaks(phase: str) -> None:
        allocated[phase] = max(allocator.peak_allocated, allocated.get(phase, 0))
        reserved[phase] = max(allocator.peak_reserved, reserved.get(phase, 0))
        segments[phase] = max(allocator.peak_segments, segments.get(phase, 0))
        allocator.reset_peaks()

    _load(allocator, trace)
    record_peaks("load")
    allocator.empty_cache()
    # the first micro-batch stores gradients, the second adds to them, and further micro-batches repeat the second
    micro_batches = [trace.parts["micro-batch"]] * (2 if trace.gradients else 1)
    for step in range(2):
        _step(allocator, trace, micro_batches, is_first=step == 0)
        record_peaks("train")
    for phase in ("save", "eval"):
        if phase in trace.parts:
            play(allocator, trace.persistent, trace.parts[phase])
            record_peaks(phase)
    return Replay(allocated, reserved, {} if expandable else segments)


def _load(allocator: CachingAllocator, trace: Trace) -> None:
    play(allocator, trace.persistent, [(WARM_UP, trace.warm_up), (WARM_UP, RELEASED), *trace.parts["load"]])


def _step(allocator: CachingAllocator, trace: Trace, micro_batches: Iterable[list[Event]], *, is_first: bool) -> None:
    gradients, first_step = trace.gradients, trace.parts["first step"]
    for index, events in enumerate(micro_batches):
        if index == 0:  # a step's first gradients become the sums, so they are not released
            events = [
                (gradients.get(number, number), size) for number, size in events if size != RELEASED or number not in gradients
            ]
        play(allocator, trace.persistent, events)
    play(allocator, trace.persistent, trace.parts["clipping"])
    if is_first:  # allocate the optimizer states, which are never released
        temporary = {number for number, size in first_step if size == RELEASED} | set(gradients.values())
        play(allocator, trace.persistent, [event for event in first_step if event[0] not in temporary])
    play(allocator, trace.persistent, trace.parts["optimizer"])


def play(allocator: CachingAllocator, persistent: frozenset[int], events: list[Event]) -> None:
    """Play the events on the allocator, first releasing allocations left by an earlier replay of the same part."""
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
    """Events of a micro-batch at any width, from traces at two widths. Raises NotRepeated if allocations differ in order."""

    def __init__(self, wide: Trace, width: int, narrow: Trace, narrow_width: int) -> None:
        events = wide.parts["micro-batch"]
        sizes = {number: size for number, size in narrow.parts["micro-batch"] if size != RELEASED}
        if [number for number, size in events if size != RELEASED] != list(sizes):
            raise NotRepeated
        # Another width changes sizes, not the order of allocations. Releases keep their places in the wider trace:
        # allocations of a step's graph, released together, have no order.
        self._formulas: list[tuple[int, float, float, float]] = [
            (number, size, 0.0, 0.0) if size == RELEASED else (number, *_formula(size, width, sizes[number], narrow_width))
            for number, size in events
        ]

    def at(self, width: int) -> list[Event]:
        square = width * width
        return [(number, round(fixed + linear * width + pair * square)) for number, fixed, linear, pair in self._formulas]


def _formula(size: int, width: int, narrow_size: int, narrow_width: int) -> tuple[float, float, float]:
    """Return fixed bytes, bytes per token, and bytes per pair of tokens."""
    slope = (size - narrow_size) / (width - narrow_width)
    fixed = size - slope * width
    if fixed >= -_LINEAR_TOLERANCE * size:
        return fixed, slope, 0.0
    # eager attention's scores and masks of padded rows grow with the square of the width; scores with a sink have
    # width * (width + 1) elements, hence the linear term
    per_pair = (size / width - narrow_size / narrow_width) / (width - narrow_width)
    return 0.0, size / width - per_pair * width, per_pair


def micro_batch_widths(lengths: Sequence[int], micro_batch_rows: int, max_length: int, accumulation: int) -> list[int]:
    """Return the widths of the first micro-batches, each padded to its longest row."""
    rng, sorted_lengths = random.Random(0), sorted(min(length, max_length) for length in lengths)
    step_rows = micro_batch_rows * accumulation
    count = min(MAX_MICRO_BATCHES, 2 * accumulation + LATER_MICRO_BATCHES)
    widths: list[int] = []
    for step in range(-(-count // accumulation)):
        step_lengths = rng.choices(sorted_lengths, k=step_rows)
        # the second longest row begins step 1 and the longest ends step 2: widths fall in step 1 and rise in later steps
        if step < 2:
            step_lengths[0] = sorted_lengths[-2:][step]
        step_lengths.sort(reverse=step == 0)
        widths += [max(step_lengths[start : start + micro_batch_rows]) for start in range(0, step_rows, micro_batch_rows)]
    return widths[:count]


def replay_widths(
    trace: Trace, micro_batches: MicroBatchEvents, widths: Sequence[int], accumulation: int, *, expandable: bool
) -> int:
    """Return the peak reserved bytes over micro-batches of these widths, `accumulation` per step, without a limit."""
    allocator = CachingAllocator(expandable=expandable)
    _load(allocator, trace)
    allocator.empty_cache()
    for start in range(0, len(widths), accumulation):
        _step(allocator, trace, map(micro_batches.at, widths[start : start + accumulation]), is_first=start == 0)
    return allocator.peak_reserved
