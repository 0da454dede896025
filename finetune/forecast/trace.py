"""The order of a dry run's allocations and releases, as the caching allocator would see it, at the full depth of the model.

A dry run of a few layers has the events of all: layers repeat, so the events of those in the middle are inserted once more for
each further layer. What a copy releases is found by its place: the same allocation of the same layer, or of its neighbour.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from finetune.forecast.depth import Depth

#: Instead of a size: the allocation of this number is released.
RELEASED = -1
#: Phases whose layers run one after another; elsewhere an event belongs to the layer of its tensor.
_RUNNING = ("forward", "backward", "eval")
#: (number of the allocation, its bytes or RELEASED)
Event = tuple[int, int]


class NotRepeated(ValueError):
    """The layers' events don't repeat, so those of a few don't give those of all."""


@dataclass(frozen=True)
class Trace:
    """Events by part of the run: load, first step, micro-batch, clipping, optimizer, save and eval.

    `kept`: numbers allocated once for the life of the process. `gradients`: number of a new gradient -> that of the gradient it
    is added to; in the first micro-batch of a step the new one is kept instead. `warm_up`: bytes of the base weights.
    """

    parts: dict[str, list[Event]]
    kept: frozenset[int] = frozenset()
    gradients: dict[int, int] | None = None
    warm_up: int = 0


class _Place(NamedTuple):
    """Where an allocation is made: the `nth` of the `run`-th sequence of events of one layer in a section."""

    section: int
    layer: int
    run: int
    nth: int

    def of(self, layer: int, nth: int | None = None) -> _Place:
        """The same place in another layer."""
        return _Place(self.section, layer, self.run, self.nth if nth is None else nth)


class _Chunk(NamedTuple):
    """Successive events of one layer (-1: of none) in one section. An event's first entry is a number or a reference."""

    section: int
    layer: int
    run: int
    events: list[tuple[int, int]]


class Recording:
    """Collects events. A section is one pass over the layers; a part is one or more sections with a name."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int, int, int]] = []  # number, bytes or RELEASED, section, layer
        self.weights: Counter[int | None] = Counter()
        self.gradients: dict[int, int] = {}
        self._parts: list[tuple[str, int]] = []
        self._kept: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._layers: list[int] = []
        self._section, self._running, self._layer = 0, False, -1

    def begin(self, part: str) -> None:
        """Events from now on belong to `part`."""
        self._parts.append((part, len(self.events)))
        self._section, self._layer = self._section + 1, -1

    def begin_phase(self, phase: str) -> None:
        """The next pass over the layers begins."""
        self._section, self._running, self._layer = self._section + 1, phase in _RUNNING, -1

    def enter(self, layer: int) -> None:
        """This layer runs until another does."""
        self._layer = layer

    def allocate(self, storage: int, size: int, layer: int | None) -> None:
        """A storage was made; `layer` is its own."""
        self._numbers[storage] = self._add(size, layer)

    def release(self, storage: int) -> None:
        """A storage was released. Unknown ones are ignored."""
        number = self._numbers.pop(storage, None)
        if number is not None:
            self._note(number, RELEASED)

    def layer_of(self, storage: int) -> int | None:
        """The layer of a storage; None for none, or an unknown storage."""
        layer = self._layers[self._numbers[storage]] if storage in self._numbers else -1
        return None if layer < 0 else layer

    def scratch(self, sizes: tuple[int, ...], layer: int | None) -> None:
        """A kernel's temporary buffers: allocated together, then released."""
        numbers = [self._add(size, layer) for size in sizes]
        for number in numbers:
            self._note(number, RELEASED)

    def keep(self, size: int) -> None:
        """A library allocates a buffer here that it never releases."""
        self._kept.add(self._add(size, None))

    def accumulate(self, new: int, into: int) -> None:
        """The storage `new`, a gradient, is about to be added to the storage `into`."""
        if new in self._numbers and into in self._numbers:
            self.gradients[self._numbers[new]] = self._numbers[into]

    def _add(self, size: int, layer: int | None) -> int:
        number = len(self._layers)
        self._layers.append(layer if layer is not None else self._layer if self._running else -1)
        self._note(number, size)
        return number

    def _note(self, number: int, size: int) -> None:
        self.events.append((number, size, self._section, self._layer if self._running else self._layers[number]))

    def trace(self, depth: Depth | None = None) -> Trace:
        """The events by part; with `depth` those of the full model. Raises NotRepeated."""
        if depth is None or not depth.times:
            plain: list[Event] = [event[:2] for event in self.events]
            starts = [start for _, start in self._parts]
            return self._trace(plain, starts, self._kept, self.gradients, sum(self.weights.values()))
        made = _Deepening(self.events, self._kept, [start for _, start in self._parts], depth)
        middle = range(depth.start, depth.start + depth.period)
        more = depth.times * sum(size for layer, size in self.weights.items() if layer in middle)
        return self._trace(made.events, made.starts, made.kept, made.pairs(self.gradients), sum(self.weights.values()) + more)

    def _trace(self, events: list[Event], starts: list[int], kept: set[int], gradients: dict[int, int], warm_up: int) -> Trace:
        ends = [*starts[1:], len(events)]
        parts: dict[str, list[Event]] = {}
        for (name, _), start, end in zip(self._parts, starts, ends, strict=True):
            parts.setdefault(name, []).extend(events[start:end])
        return Trace(parts, frozenset(kept), gradients, warm_up)


class _Deepening:
    """Inserts the events of the repeated layers."""

    def __init__(self, events: list[tuple[int, int, int, int]], kept: set[int], starts: list[int], depth: Depth) -> None:
        self._depth, self._more = depth, depth.times * depth.period
        self._middle = range(depth.start, depth.start + depth.period)
        self._kept_before, self.kept = kept, set[int]()
        self._places: dict[int, _Place] = {}
        self._sizes: dict[tuple[int, int, int], list[int]] = {}
        self._made: dict[_Place, int] = {}
        self._copied_from: dict[int, _Place] = {}
        self._count = 0
        self.events: list[Event] = []
        self.starts: list[int] = []
        chunks = self._chunks(events, starts)
        position, begun = 0, 0
        while position < len(chunks):
            while begun < len(starts) and chunks[position][0] >= starts[begun]:
                self.starts.append(len(self.events))
                begun += 1
            chunk = chunks[position][1]
            if chunk.layer not in self._middle:
                self._put(chunk, self._shifted(chunk.layer))
                position += 1
                continue
            end = position
            while end < len(chunks) and chunks[end][1].section == chunk.section and chunks[end][1].layer in self._middle:
                end += 1
            run = [one for _, one in chunks[position:end]]
            order = range(depth.times + 1)
            for time in reversed(order) if self._descends([one for _, one in chunks], position, end) else order:
                for one in run:
                    self._put(one, one.layer + time * depth.period, first=time == 0)
            position = end
        self.starts += [len(self.events)] * (len(starts) - begun)
        self._release_with_the_first()

    def _release_with_the_first(self) -> None:
        """Release what was copied and never released where the allocation that it is a copy of is released.

        Some operators keep tensors of all layers until the whole graph is gone (int8's saved activations): one layer's events
        release them, those of a layer that is not copied.
        """
        released = {number for number, size in self.events if size == RELEASED}
        left: dict[int, list[int]] = {}
        for copy, place in self._copied_from.items():
            first = self._made[place]
            if copy not in released and first in released:
                left.setdefault(first, []).append(copy)
        if not left:
            return
        events: list[Event] = []
        starts = Counter(self.starts)
        moved: list[int] = []
        for index, event in enumerate(self.events):
            moved += [len(events)] * starts[index]
            events.append(event)
            if event[1] == RELEASED:
                events += [(copy, RELEASED) for copy in left.get(event[0], ())]
        self.starts = moved + [len(events)] * starts[len(self.events)]
        self.events = events

    def _chunks(self, events: list[tuple[int, int, int, int]], starts: list[int]) -> list[tuple[int, _Chunk]]:
        """The chunks, each with the index of its first event; a new part begins a new section."""
        chunks: list[tuple[int, _Chunk]] = []
        runs: Counter[tuple[int, int]] = Counter()
        place, sizes = None, []
        for index, (number, size, section, layer) in enumerate(events):
            if (section, layer) != place:
                place = (section, layer)
                chunk = _Chunk(section, layer, runs[place], [])
                runs[place] += 1
                chunks.append((index, chunk))
                sizes = self._sizes[(section, layer, chunk.run)] = []
            if size >= 0 and number not in self._kept_before:
                self._places[number] = _Place(section, layer, chunk.run, len(sizes))
                sizes.append(size)
            chunk.events.append((number, size))
        return chunks

    def _descends(self, chunks: list[_Chunk], start: int, end: int) -> bool:
        """Whether the section runs from the last layer to the first, by what comes before and after."""
        section = chunks[start].section
        for index, sign in ((start, 1), (end, -1)):
            for one in reversed(chunks[:start]) if index == start else iter(chunks[end:]):
                if one.section != section:
                    break
                if one.layer >= 0:
                    return (one.layer - chunks[start].layer) * sign > 0
        return False

    def _put(self, chunk: _Chunk, layer: int, *, first: bool = True) -> None:
        """Add a chunk's events at `layer` of the full model. `first`: the chunk itself, not a copy."""
        made, places, events, count = self._made, self._places, self.events, 0
        for number, size in chunk.events:
            if size == RELEASED:
                where = self._referred(places[number], chunk.layer, layer)
                if where not in made:
                    raise NotRepeated
                events.append((made[where], RELEASED))
                continue
            if number in self._kept_before:
                if first:
                    self.kept.add(self._count)
                    events.append((self._count, size))
                    self._count += 1
                continue
            made[_Place(chunk.section, layer, chunk.run, count)] = self._count
            if not first:
                self._copied_from[self._count] = _Place(chunk.section, chunk.layer, chunk.run, count)
            events.append((self._count, size))
            self._count += 1
            count += 1

    def _shifted(self, layer: int) -> int:
        return layer + self._more if layer >= self._middle.stop else layer

    def _origin(self, layer: int) -> int:
        """The layer of the dry run whose events stand for this one of the full model."""
        if layer < self._middle.stop:
            return layer
        if layer >= self._middle.stop + self._more:
            return layer - self._more
        return self._middle.start + (layer - self._middle.start) % self._depth.period

    def _referred(self, place: _Place, here: int, there: int) -> _Place:
        """What an event of layer `here` means by `place` when it stands at `there`."""
        if place.layer < 0:
            return place
        near = here >= 0 and abs(place.layer - here) <= self._depth.period
        layer = there + place.layer - here if near else self._shifted(place.layer)
        origin = self._origin(layer)
        if origin == place.layer:
            return place.of(layer)
        return place.of(layer, self._counterpart(place, origin))

    def _counterpart(self, place: _Place, origin: int) -> int:
        """The number of the same allocation in another layer, which may allocate something more or less once in its course."""
        own = self._sizes[place[:3]]
        other = self._sizes.get((place.section, origin, place.run))
        if other is None:
            raise NotRepeated
        if own == other:
            return place.nth
        same = next((i for i, (one, two) in enumerate(zip(own, other, strict=False)) if one != two), min(len(own), len(other)))
        if place.nth < same:
            return place.nth
        from_end = len(own) - place.nth
        if from_end > len(other) or own[-from_end:] != other[len(other) - from_end :]:
            raise NotRepeated
        return len(other) - from_end

    def pairs(self, numbers: dict[int, int]) -> dict[int, int]:
        """Pairs of allocations of one layer, for every layer."""
        made = {}
        for one, two in numbers.items():
            for first, second in zip(self._copies(one), self._copies(two), strict=True):
                made[first] = second
        return made

    def _copies(self, number: int) -> Iterator[int]:
        place = self._places[number]
        times = self._depth.times + 1 if place.layer in self._middle else 1
        for time in range(times):
            yield self._made[place.of(self._shifted(place.layer) + time * self._depth.period)]
