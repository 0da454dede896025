"""Order of a dry run's allocations and releases at the model's full depth, as the caching allocator sees it."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count, groupby
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from finetune.memory.depth import Depth

#: In place of a size: release the allocation with this number.
RELEASED = -1
#: Phases whose layers run in turn; in other phases an event belongs to its tensor's layer.
_RUNNING = ("forward", "backward", "eval")
#: (number of the allocation, its bytes or RELEASED)
Event = tuple[int, int]
#: The same with its section and layer.
_RecordedEvent = tuple[int, int, int, int]


class NotRepeated(ValueError):
    """The layers' events don't repeat, so a few layers can't stand for all."""


@dataclass(frozen=True)
class Trace:
    """Events by part of the run: load, first step, micro-batch, clipping, optimizer, save and eval."""

    parts: dict[str, list[Event]]
    #: Numbers of allocations that live as long as the process.
    persistent: frozenset[int] = frozenset()
    #: Number of a new gradient -> number of its sum; a step's first micro-batch stores the new gradient instead.
    gradients: dict[int, int] = field(default_factory=dict)
    #: Bytes of the base weights.
    warm_up: int = 0


class _AllocationKey(NamedTuple):
    """Key of an allocation: the `nth` in the `run`-th event sequence of a layer in a section."""

    section: int
    layer: int
    run: int
    nth: int


class _Chunk(NamedTuple):
    """Successive events of one layer (-1: no layer) in one section."""

    section: int
    layer: int
    run: int
    events: list[Event]


class Recording:
    """Recorder of events. A section is one pass over the layers; a part is one or more named sections."""

    def __init__(self) -> None:
        self.events: list[_RecordedEvent] = []
        self.weights: Counter[int | None] = Counter()
        self.gradients: dict[int, int] = {}
        self._parts: list[tuple[str, int]] = []
        self._persistent: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._layers: list[int] = []
        self._section, self._running, self.running_layer = 0, False, -1

    def begin_part(self, part: str) -> None:
        self._section += 1
        self.running_layer = -1
        self._parts.append((part, self._section))

    def begin_phase(self, phase: str) -> None:
        self._section += 1
        self._running, self.running_layer = phase in _RUNNING, -1

    def allocate(self, storage: int, size: int, layer: int | None) -> None:
        self._numbers[storage] = self._add(size, layer)

    def release(self, storage: int) -> None:
        number = self._numbers.pop(storage, None)
        if number is not None:
            self._note(number, RELEASED)

    def layer_of(self, storage: int) -> int | None:
        layer = self._layers[self._numbers[storage]] if storage in self._numbers else -1
        return None if layer < 0 else layer

    def scratch(self, sizes: tuple[int, ...], layer: int | None) -> None:
        """Record a kernel's temporary buffers, allocated together."""
        numbers = [self._add(size, layer) for size in sizes]
        for number in numbers:
            self._note(number, RELEASED)

    def keep(self, size: int) -> None:
        """Record a buffer that a library never releases."""
        self._persistent.add(self._add(size, None))

    def accumulate(self, new: int, into: int) -> None:
        """Record that gradient `new` will be added to storage `into`."""
        if new in self._numbers and into in self._numbers:
            self.gradients[self._numbers[new]] = self._numbers[into]

    def _add(self, size: int, layer: int | None) -> int:
        number = len(self._layers)
        self._layers.append(layer if layer is not None else self.running_layer if self._running else -1)
        self._note(number, size)
        return number

    def _note(self, number: int, size: int) -> None:
        self.events.append((number, size, self._section, self.running_layer if self._running else self._layers[number]))

    def trace(self, depth: Depth | None = None) -> Trace:
        """Return the events by part, repeated to `depth`. Raises NotRepeated."""
        events, persistent, gradients = [event[:3] for event in self.events], self._persistent, self.gradients
        warm_up = self.weights.total()
        if depth is not None and depth.times:
            deep = _Deepening(self.events, persistent, depth)
            events, persistent, gradients = deep.events, deep.persistent, deep.pairs(gradients)
            warm_up += depth.times * sum(size for layer, size in self.weights.items() if layer in depth.middle)
        parts: dict[str, list[Event]] = {name: [] for name, _ in self._parts}
        starts = [section for _, section in self._parts]
        for section, in_section in groupby(events, key=itemgetter(2)):
            if section >= starts[0]:
                name, _ = self._parts[bisect_right(starts, section) - 1]
                parts[name] += [event[:2] for event in in_section]
        return Trace(parts, frozenset(persistent), gradients, warm_up)


# Layers repeat, so the events of the middle layers are inserted once more for each further layer.
class _Deepening:
    """Insertion of the repeated layers' events."""

    def __init__(self, events: list[_RecordedEvent], persistent: set[int], depth: Depth) -> None:
        self._depth, self._persistent_before = depth, persistent
        self.persistent: set[int] = set()
        self._keys: dict[int, _AllocationKey] = {}
        self._sizes: dict[tuple[int, int, int], list[int]] = {}
        self._numbers_by_key: dict[_AllocationKey, int] = {}
        self._original_of: dict[int, _AllocationKey] = {}
        self._numbers = count()
        #: (number, bytes or RELEASED, section)
        self.events: list[tuple[int, int, int]] = []
        for _, in_section in groupby(list(self._chunks(events)), key=attrgetter("section")):
            self._deepen(list(in_section))
        self._release_copies()

    def _chunks(self, events: list[_RecordedEvent]) -> Iterator[_Chunk]:
        runs: Counter[tuple[int, int]] = Counter()
        for (section, layer), recorded in groupby(events, key=itemgetter(2, 3)):
            chunk = _Chunk(section, layer, runs[(section, layer)], [event[:2] for event in recorded])
            runs[(section, layer)] += 1
            sizes = self._sizes[chunk[:3]] = []
            for number, size in chunk.events:
                if size != RELEASED and number not in self._persistent_before:
                    self._keys[number] = _AllocationKey(*chunk[:3], len(sizes))
                    sizes.append(size)
            yield chunk

    def _deepen(self, section: list[_Chunk]) -> None:
        depth, end = self._depth, 0
        for is_middle, repeated in groupby(section, key=lambda chunk: chunk.layer in depth.middle):
            chunks, start = list(repeated), end
            end += len(chunks)
            if not is_middle:
                for chunk in chunks:
                    self._append(chunk, depth.full_index(chunk.layer))
                continue
            order = range(depth.times + 1)
            for time in reversed(order) if _descends(section[:start], chunks[0], section[end:]) else order:
                for chunk in chunks:
                    self._append(chunk, chunk.layer + time * depth.period, first=time == 0)

    def _release_copies(self) -> None:
        # some operators (int8's saved activations) hold tensors of all layers until the whole graph is freed: events of one
        # layer, which is not copied, release them
        released = {number for number, size, _ in self.events if size == RELEASED}
        unreleased = defaultdict[int, list[int]](list)
        for copy, key in self._original_of.items():
            if copy not in released:
                unreleased[self._numbers_by_key[key]].append(copy)
        events, self.events = self.events, []
        for number, size, section in events:
            self.events.append((number, size, section))
            if size == RELEASED:
                self.events += [(copy, RELEASED, section) for copy in unreleased[number]]

    def _append(self, chunk: _Chunk, layer: int, *, first: bool = True) -> None:
        """Add a chunk's events at `layer` of the full model; `first` unless they are a copy."""
        numbers, section, nth = self._numbers_by_key, chunk.section, 0
        for number, size in chunk.events:
            if size == RELEASED:
                key = self._resolve(self._keys[number], chunk.layer, layer)
                if key not in numbers:
                    raise NotRepeated
                self.events.append((numbers[key], RELEASED, section))
                continue
            is_persistent = number in self._persistent_before
            if is_persistent and not first:
                continue
            copy = next(self._numbers)
            self.events.append((copy, size, section))
            if is_persistent:
                self.persistent.add(copy)
                continue
            numbers[_AllocationKey(section, layer, chunk.run, nth)] = copy
            if not first:
                self._original_of[copy] = _AllocationKey(section, chunk.layer, chunk.run, nth)
            nth += 1

    def _resolve(self, key: _AllocationKey, from_layer: int, to_layer: int) -> _AllocationKey:
        """Return the key of the allocation released when an event of `from_layer` is copied to `to_layer`."""
        if key.layer < 0:
            return key
        # a copy releases the same allocation of its layer, or of a neighbouring layer
        is_neighbour = from_layer >= 0 and abs(key.layer - from_layer) <= self._depth.period
        layer = to_layer + key.layer - from_layer if is_neighbour else self._depth.full_index(key.layer)
        source = self._depth.shallow_index(layer)
        nth = key.nth if source == key.layer else self._counterpart(key, source)
        return _AllocationKey(key.section, layer, key.run, nth)

    def _counterpart(self, key: _AllocationKey, source: int) -> int:
        """Return the number of the same allocation in layer `source`."""
        own = self._sizes[key[:3]]
        other = self._sizes.get((key.section, source, key.run))
        if other is None:
            raise NotRepeated
        if own == other:
            return key.nth
        # a layer may have one allocation more or less at one point: count from the end behind that point
        differs_at = next((i for i, (a, b) in enumerate(zip(own, other, strict=False)) if a != b), min(len(own), len(other)))
        if key.nth < differs_at:
            return key.nth
        from_end = len(own) - key.nth
        if from_end > len(other) or own[-from_end:] != other[len(other) - from_end :]:
            raise NotRepeated
        return len(other) - from_end

    def pairs(self, numbers: dict[int, int]) -> dict[int, int]:
        """Return the pairs of `numbers` for every layer. Raises NotRepeated where one side repeats alone."""
        pairs: dict[int, int] = {}
        for new, target in numbers.items():
            new_copies, target_copies = list(self._copies(new)), list(self._copies(target))
            if len(new_copies) != len(target_copies):
                raise NotRepeated
            pairs |= zip(new_copies, target_copies, strict=True)
        return pairs

    def _copies(self, number: int) -> Iterator[int]:
        key, depth = self._keys[number], self._depth
        for time in range(depth.times + 1 if key.layer in depth.middle else 1):
            layer = depth.full_index(key.layer) + time * depth.period
            yield self._numbers_by_key[_AllocationKey(key.section, layer, key.run, key.nth)]


def _descends(before: list[_Chunk], middle: _Chunk, after: list[_Chunk]) -> bool:
    """Tell whether a section runs from the last layer to the first, as the neighbouring chunks show."""
    earlier = [chunk.layer for chunk in before if chunk.layer >= 0]
    if earlier:
        return earlier[-1] > middle.layer
    return next((chunk.layer for chunk in after if chunk.layer >= 0), middle.layer) < middle.layer
