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
#: Phases whose layers run in turn: an event belongs to the running layer, in other phases to its tensor's layer.
_LAYERWISE_PHASES = ("forward", "backward", "eval")
#: (number of the allocation, its bytes or RELEASED)
Event = tuple[int, int]
#: (number, bytes or RELEASED, section, layer; -1: no layer)
_RecordedEvent = tuple[int, int, int, int]


class NotRepeated(ValueError):
    """The layers' events don't repeat, so a few layers can't represent all."""


@dataclass(frozen=True)
class Trace:
    """Events by part of the run: load, first step, micro-batch, clipping, optimizer, save and eval."""

    parts: dict[str, list[Event]]
    #: Numbers of allocations that live as long as the process.
    persistent: frozenset[int] = frozenset()
    #: Number of a new gradient -> number of its sum. In a step's first micro-batch the new gradient becomes the sum.
    gradients: dict[int, int] = field(default_factory=dict)
    #: Bytes of the base weights.
    warm_up: int = 0


class _AllocationKey(NamedTuple):
    """Key of an allocation: the `nth` in a layer's chunk number `run` of a section."""

    section: int
    layer: int
    run: int
    nth: int


class _Chunk(NamedTuple):
    """Consecutive events of one layer (-1: no layer) in one section."""

    section: int
    layer: int
    events: list[Event]


class Recording:
    """Recorder of events. A section is one pass over the layers; a part is one or more named sections."""

    def __init__(self) -> None:
        self.events: list[_RecordedEvent] = []
        self.weights: Counter[int | None] = Counter()  # bytes by layer
        self.gradients: dict[int, int] = {}
        self._parts: list[tuple[str, int]] = []  # with the first section
        self._persistent: set[int] = set()
        self._numbers: dict[int, int] = {}  # of live allocations, by storage
        self._layers: list[int] = []  # by number of the allocation
        self._section, self._is_layerwise, self.running_layer = 0, False, -1

    def begin_part(self, part: str) -> None:
        self._section += 1
        self.running_layer = -1
        self._parts.append((part, self._section))

    def begin_phase(self, phase: str) -> None:
        self._section += 1
        self._is_layerwise, self.running_layer = phase in _LAYERWISE_PHASES, -1

    def allocate(self, storage: int, size: int, layer: int | None) -> None:
        self._numbers[storage] = self._add(size, layer)

    def release(self, storage: int) -> None:
        number = self._numbers.pop(storage, None)
        if number is not None:
            self._append(number, RELEASED)

    def layer_of(self, storage: int) -> int | None:
        layer = self._layers[self._numbers[storage]] if storage in self._numbers else -1
        return None if layer < 0 else layer

    def scratch(self, sizes: tuple[int, ...], layer: int | None) -> None:
        """Record a kernel's temporary buffers, allocated together."""
        numbers = [self._add(size, layer) for size in sizes]
        for number in numbers:
            self._append(number, RELEASED)

    def add_persistent(self, size: int) -> None:
        """Record a buffer that a library never releases."""
        self._persistent.add(self._add(size, None))

    def accumulate(self, new: int, into: int) -> None:
        """Record that gradient `new` will be added to storage `into`."""
        if new in self._numbers and into in self._numbers:
            self.gradients[self._numbers[new]] = self._numbers[into]

    def _add(self, size: int, layer: int | None) -> int:
        number = len(self._layers)
        default_layer = self.running_layer if self._is_layerwise else -1
        self._layers.append(default_layer if layer is None else layer)
        self._append(number, size)
        return number

    def _append(self, number: int, size: int) -> None:
        layer = self.running_layer if self._is_layerwise else self._layers[number]
        self.events.append((number, size, self._section, layer))

    def trace(self, depth: Depth | None = None) -> Trace:
        """Return the events by part, repeated to `depth`. Raises NotRepeated."""
        events, persistent, gradients = [event[:3] for event in self.events], self._persistent, self.gradients
        warm_up = self.weights.total()
        if depth is not None and depth.times:
            deep = _Deepening(self.events, persistent, depth)
            events, persistent, gradients = deep.events, deep.persistent, deep.repeated_pairs(gradients)
            warm_up += depth.times * sum(size for layer, size in self.weights.items() if layer in depth.middle)
        parts: dict[str, list[Event]] = {name: [] for name, _ in self._parts}
        first_sections = [section for _, section in self._parts]
        for section, section_events in groupby(events, key=itemgetter(2)):
            if section >= first_sections[0]:
                name, _ = self._parts[bisect_right(first_sections, section) - 1]
                parts[name] += [event[:2] for event in section_events]
        return Trace(parts, frozenset(persistent), gradients, warm_up)


# Layers repeat, so the events of the middle layers are inserted once more for each further layer.
class _Deepening:
    """Insertion of the repeated layers' events. Allocations get new numbers."""

    def __init__(self, events: list[_RecordedEvent], persistent: set[int], depth: Depth) -> None:
        self._depth, self._recorded_persistent = depth, persistent
        self.persistent: set[int] = set()
        self._keys: dict[int, _AllocationKey] = {}  # by recorded number
        self._sizes: dict[tuple[int, int, int], list[int]] = {}  # of allocations, by section, layer and run
        self._numbers_by_key: dict[_AllocationKey, int] = {}
        self._original_of: dict[int, _AllocationKey] = {}  # by number of the copy
        self._new_numbers = count()
        #: (number, bytes or RELEASED, section)
        self.events: list[tuple[int, int, int]] = []
        for _, section in groupby(list(self._chunks(events)), key=attrgetter("section")):
            self._deepen(list(section))
        self._release_copies()

    def _chunks(self, events: list[_RecordedEvent]) -> Iterator[_Chunk]:
        runs: Counter[tuple[int, int]] = Counter()
        for (section, layer), recorded in groupby(events, key=itemgetter(2, 3)):
            chunk_key = (section, layer, runs[(section, layer)])
            chunk = _Chunk(section, layer, [event[:2] for event in recorded])
            runs[(section, layer)] += 1
            sizes = self._sizes[chunk_key] = []
            for number, size in chunk.events:
                if size != RELEASED and number not in self._recorded_persistent:
                    self._keys[number] = _AllocationKey(*chunk_key, len(sizes))
                    sizes.append(size)
            yield chunk

    def _deepen(self, section: list[_Chunk]) -> None:
        depth, end = self._depth, 0
        for is_middle, group in groupby(section, key=lambda chunk: chunk.layer in depth.middle):
            chunks, start = list(group), end
            end += len(chunks)
            if not is_middle:
                for chunk in chunks:
                    self._append(chunk, depth.full_index(chunk.layer))
                continue
            repetitions = list(range(depth.times + 1))
            if _descends(section[:start], chunks[0], section[end:]):
                repetitions.reverse()
            for repetition in repetitions:
                for chunk in chunks:
                    self._append(chunk, chunk.layer + repetition * depth.period, is_copy=repetition > 0)

    def _release_copies(self) -> None:
        # Some operators (int8's saved activations) keep tensors of all layers until the whole graph is freed. The layer whose
        # events release them is not copied, so release the copies after their originals.
        released = {number for number, size, _ in self.events if size == RELEASED}
        copies_by_original = defaultdict[int, list[int]](list)
        for copy, key in self._original_of.items():
            if copy not in released:
                copies_by_original[self._numbers_by_key[key]].append(copy)
        events, self.events = self.events, []
        for number, size, section in events:
            self.events.append((number, size, section))
            if size == RELEASED:
                self.events += [(copy, RELEASED, section) for copy in copies_by_original[number]]

    def _append(self, chunk: _Chunk, layer: int, *, is_copy: bool = False) -> None:
        """Add a chunk's events at `layer` of the full model."""
        numbers, section = self._numbers_by_key, chunk.section
        for recorded_number, size in chunk.events:
            if size == RELEASED:
                key = self._released_key(self._keys[recorded_number], chunk.layer, layer)
                if key not in numbers:
                    raise NotRepeated
                self.events.append((numbers[key], RELEASED, section))
                continue
            is_persistent = recorded_number in self._recorded_persistent
            if is_persistent and is_copy:
                continue
            number = next(self._new_numbers)
            self.events.append((number, size, section))
            if is_persistent:
                self.persistent.add(number)
                continue
            key = self._keys[recorded_number]
            numbers[key._replace(layer=layer)] = number
            if is_copy:
                self._original_of[number] = key

    def _released_key(self, key: _AllocationKey, from_layer: int, to_layer: int) -> _AllocationKey:
        """Return the key of the allocation released when the release of `key` is copied between layers."""
        if key.layer < 0:
            return key
        # a copy releases the same allocation of its layer, or of a neighbouring layer
        is_neighbour = from_layer >= 0 and abs(key.layer - from_layer) <= self._depth.period
        layer = to_layer + key.layer - from_layer if is_neighbour else self._depth.full_index(key.layer)
        shallow_layer = self._depth.shallow_index(layer)
        nth = key.nth if shallow_layer == key.layer else self._corresponding_nth(key, shallow_layer)
        return key._replace(layer=layer, nth=nth)

    def _corresponding_nth(self, key: _AllocationKey, layer: int) -> int:
        sizes = self._sizes[key[:3]]
        other_sizes = self._sizes.get((key.section, layer, key.run))
        if other_sizes is None:
            raise NotRepeated
        # a layer may have one allocation more or less at one point: before it count from the start, behind it from the end
        if sizes[: key.nth + 1] == other_sizes[: key.nth + 1]:
            return key.nth
        from_end = len(sizes) - key.nth
        if from_end > len(other_sizes) or sizes[-from_end:] != other_sizes[-from_end:]:
            raise NotRepeated
        return len(other_sizes) - from_end

    def repeated_pairs(self, pairs: dict[int, int]) -> dict[int, int]:
        """Return pairs of allocations for every layer. Raises NotRepeated where one side repeats alone."""
        repeated: dict[int, int] = {}
        for first, second in pairs.items():
            first_numbers, second_numbers = list(self._numbers_of(first)), list(self._numbers_of(second))
            if len(first_numbers) != len(second_numbers):
                raise NotRepeated
            repeated |= zip(first_numbers, second_numbers, strict=True)
        return repeated

    def _numbers_of(self, recorded_number: int) -> Iterator[int]:
        key, depth = self._keys[recorded_number], self._depth
        for repetition in range(depth.times + 1 if key.layer in depth.middle else 1):
            layer = depth.full_index(key.layer) + repetition * depth.period
            yield self._numbers_by_key[key._replace(layer=layer)]


# Whether a section runs from the last layer to the first, as the neighbouring chunks show.
def _descends(before: list[_Chunk], middle: _Chunk, after: list[_Chunk]) -> bool:
    earlier_layers = [chunk.layer for chunk in before if chunk.layer >= 0]
    if earlier_layers:
        return earlier_layers[-1] > middle.layer
    return next((chunk.layer for chunk in after if chunk.layer >= 0), middle.layer) < middle.layer
