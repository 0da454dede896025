"""Order of a dry run's allocations and releases at the model's full depth, as the caching allocator sees it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from finetune.memory.depth import Depth

#: In place of a size: release the allocation with this number.
RELEASED = -1
#: Phases whose layers run in turn; in other phases an event belongs to its tensor's layer.
_RUNNING = ("forward", "backward", "eval")
#: (number of the allocation, its bytes or RELEASED)
Event = tuple[int, int]


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
    events: list[tuple[int, int]]


class Recording:
    """Recorder of events. A section is one pass over the layers; a part is one or more named sections."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int, int, int]] = []  # number, bytes or RELEASED, section, layer
        self.weights: Counter[int | None] = Counter()
        self.gradients: dict[int, int] = {}
        self._parts: list[tuple[str, int]] = []
        self._persistent: set[int] = set()
        self._numbers: dict[int, int] = {}
        self._layers: list[int] = []
        self._section, self._running, self._layer = 0, False, -1

    def begin(self, part: str) -> None:
        self._parts.append((part, len(self.events)))
        self._section, self._layer = self._section + 1, -1

    def begin_phase(self, phase: str) -> None:
        self._section, self._running, self._layer = self._section + 1, phase in _RUNNING, -1

    def enter(self, layer: int) -> None:
        self._layer = layer

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
        self._layers.append(layer if layer is not None else self._layer if self._running else -1)
        self._note(number, size)
        return number

    def _note(self, number: int, size: int) -> None:
        self.events.append((number, size, self._section, self._layer if self._running else self._layers[number]))

    def trace(self, depth: Depth | None = None) -> Trace:
        """Return the events by part, repeated to `depth`. Raises NotRepeated."""
        events: list[Event] = [event[:2] for event in self.events]
        starts, persistent, gradients = [start for _, start in self._parts], self._persistent, self.gradients
        warm_up = self.weights.total()
        if depth is not None and depth.times:
            deep = _Deepening(self.events, persistent, starts, depth)
            events, starts, persistent, gradients = deep.events, deep.starts, deep.persistent, deep.pairs(gradients)
            warm_up += depth.times * sum(size for layer, size in self.weights.items() if layer in depth.middle)
        parts: dict[str, list[Event]] = {}
        for (name, _), start, end in zip(self._parts, starts, [*starts[1:], len(events)], strict=True):
            parts.setdefault(name, []).extend(events[start:end])
        return Trace(parts, frozenset(persistent), gradients, warm_up)


# Layers repeat, so the events of the middle layers are inserted once more for each further layer.
class _Deepening:
    """Insertion of the repeated layers' events."""

    def __init__(self, events: list[tuple[int, int, int, int]], persistent: set[int], starts: list[int], depth: Depth) -> None:
        self._depth, self._middle = depth, depth.middle
        self._persistent_before, self.persistent = persistent, set[int]()
        self._keys: dict[int, _AllocationKey] = {}
        self._sizes: dict[tuple[int, int, int], list[int]] = {}
        self._numbers_by_key: dict[_AllocationKey, int] = {}
        self._original_of: dict[int, _AllocationKey] = {}
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
                self._append(chunk, self._depth.full_index(chunk.layer))
                position += 1
                continue
            end = position
            while end < len(chunks) and chunks[end][1].section == chunk.section and chunks[end][1].layer in self._middle:
                end += 1
            middle_chunks = [c for _, c in chunks[position:end]]
            order = range(depth.times + 1)
            for time in reversed(order) if self._descends([c for _, c in chunks], position, end) else order:
                for c in middle_chunks:
                    self._append(c, c.layer + time * depth.period, first=time == 0)
            position = end
        self.starts += [len(self.events)] * (len(starts) - begun)
        self._release_copies()

    def _release_copies(self) -> None:
        """Release unreleased copies where their original is released."""
        # some operators (int8's saved activations) hold tensors of all layers until the whole graph is freed: events of one
        # layer, which is not copied, release them
        released = {number for number, size in self.events if size == RELEASED}
        unreleased: dict[int, list[int]] = {}
        for copy, key in self._original_of.items():
            first = self._numbers_by_key[key]
            if copy not in released and first in released:
                unreleased.setdefault(first, []).append(copy)
        if not unreleased:
            return
        events: list[Event] = []
        starts = Counter(self.starts)
        moved: list[int] = []
        for index, event in enumerate(self.events):
            moved += [len(events)] * starts[index]
            events.append(event)
            if event[1] == RELEASED:
                events += [(copy, RELEASED) for copy in unreleased.get(event[0], ())]
        self.starts = moved + [len(events)] * starts[len(self.events)]
        self.events = events

    def _chunks(self, events: list[tuple[int, int, int, int]], starts: list[int]) -> list[tuple[int, _Chunk]]:
        chunks: list[tuple[int, _Chunk]] = []
        runs: Counter[tuple[int, int]] = Counter()
        section_and_layer, sizes = None, []
        for index, (number, size, section, layer) in enumerate(events):
            if (section, layer) != section_and_layer:
                section_and_layer = (section, layer)
                chunk = _Chunk(section, layer, runs[section_and_layer], [])
                runs[section_and_layer] += 1
                chunks.append((index, chunk))
                sizes = self._sizes[(section, layer, chunk.run)] = []
            if size >= 0 and number not in self._persistent_before:
                self._keys[number] = _AllocationKey(section, layer, chunk.run, len(sizes))
                sizes.append(size)
            chunk.events.append((number, size))
        return chunks

    def _descends(self, chunks: list[_Chunk], start: int, end: int) -> bool:
        """Tell whether the section runs from the last layer to the first."""
        section = chunks[start].section
        # the neighbouring chunks show the direction
        for index, sign in ((start, 1), (end, -1)):
            for chunk in reversed(chunks[:start]) if index == start else iter(chunks[end:]):
                if chunk.section != section:
                    break
                if chunk.layer >= 0:
                    return (chunk.layer - chunks[start].layer) * sign > 0
        return False

    def _append(self, chunk: _Chunk, layer: int, *, first: bool = True) -> None:
        """Add a chunk's events at `layer` of the full model; `first` unless they are a copy."""
        numbers, keys, events, count = self._numbers_by_key, self._keys, self.events, 0
        for number, size in chunk.events:
            if size == RELEASED:
                key = self._resolve(keys[number], chunk.layer, layer)
                if key not in numbers:
                    raise NotRepeated
                events.append((numbers[key], RELEASED))
                continue
            if number in self._persistent_before:
                if first:
                    self.persistent.add(self._count)
                    events.append((self._count, size))
                    self._count += 1
                continue
            numbers[_AllocationKey(chunk.section, layer, chunk.run, count)] = self._count
            if not first:
                self._original_of[self._count] = _AllocationKey(chunk.section, chunk.layer, chunk.run, count)
            events.append((self._count, size))
            self._count += 1
            count += 1

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
        key = self._keys[number]
        times = self._depth.times + 1 if key.layer in self._middle else 1
        for time in range(times):
            layer = self._depth.full_index(key.layer) + time * self._depth.period
            yield self._numbers_by_key[_AllocationKey(key.section, layer, key.run, key.nth)]
