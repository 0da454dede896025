"""What torch reserves for a run: its trace, from load over two steps and an evaluation, through the caching allocator."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.forecast.caching_allocator import CachingAllocator
from finetune.forecast.trace import RELEASED, Event, Trace

#: Number of the block that transformers allocates and frees before loading, as large as all weights (caching_allocator_warmup).
WARM_UP = -1


@dataclass(frozen=True)
class Replay:
    """Peaks of a replayed run, bytes. `retries`: how often cached blocks had to be freed to stay within the limit."""

    allocated_bytes: int
    reserved_bytes: int
    retries: int


def replay(trace: Trace, *, expandable: bool, limit: int | None = None) -> Replay:
    """The run on a card with this allocator. Raises OutOfMemory when it does not fit `limit`."""
    allocator = CachingAllocator(expandable=expandable, limit=limit)
    player = Player(allocator, trace.kept)
    player.play([(WARM_UP, trace.warm_up), (WARM_UP, RELEASED)])
    player.play(trace.parts["load"])
    allocator.empty_cache()
    for events in _steps(trace):
        player.play(events)
    return Replay(allocator.peak_allocated, allocator.peak_reserved, allocator.retries)


def _steps(trace: Trace) -> list[list[Event]]:
    """What follows loading: two optimizer steps, of two micro-batches where gradients accumulate, a save and an evaluation."""
    parts, gradients = trace.parts, trace.gradients or {}
    accumulating = parts["micro-batch"]
    first = [
        (gradients.get(number, number), size) for number, size in accumulating if size != RELEASED or number not in gradients
    ]
    micro = [first, accumulating] if gradients else [first]
    states = _states(parts["first step"], set(gradients.values()))
    return [
        *micro, parts["clipping"], states, parts["optimizer"],
        *micro, parts["clipping"], parts["optimizer"], parts["save"], parts.get("eval", []),
    ]  # fmt: skip


def _states(events: list[Event], gradients: set[int]) -> list[Event]:
    """What stays of the first optimizer step: the states."""
    gone = {number for number, size in events if size == RELEASED} | gradients
    return [event for event in events if event[0] not in gone]


class Player:
    """Plays parts on an allocator, some of them more than once."""

    def __init__(self, allocator: CachingAllocator, kept: frozenset[int]) -> None:
        self._allocator, self._kept = allocator, kept

    def play(self, events: list[Event]) -> None:
        """Allocate and release. What an earlier play of the same part left is released when it is allocated again."""
        allocator, kept = self._allocator, self._kept
        allocate, release, live = allocator.allocate, allocator.release, allocator.live
        for number, size in events:
            if size == RELEASED:
                if number in live:
                    release(number)
            elif number not in live:
                allocate(number, size)
            elif number not in kept:
                release(number)
                allocate(number, size)
