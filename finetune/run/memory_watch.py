"""Warnings about memory leaks, spills to host memory, fragmentation and other programs."""

from __future__ import annotations

import itertools
import statistics
from collections import deque

from finetune.card.allocator import has_windows_driver
from finetune.events import Event, Memory, Phase
from finetune.units import GIB, MIB, format_bytes

_SLOW_FACTOR = 5.0  # spills to host memory are silent; users report 10 to 1000 times slower steps
_OTHERS_GREW_BYTES = 512 * MIB
_LEAK_EPOCHS, _LEAK_BYTES = 3, 32 * MIB
_FRAGMENTED_SHARE, _FRAGMENTED_BYTES = 0.25, GIB


class MemoryWatch:
    """Returns warnings about the memory of a run, each once."""

    def __init__(self, may_spill: bool | None = None) -> None:
        # None: ask this machine whether a full GPU spills to host memory
        self._may_spill = has_windows_driver() if may_spill is None else may_spill
        self._warned: set[str] = set()
        self._step_s: deque[float] = deque(maxlen=50)
        self._others_bytes: int | None = None
        self._levels: deque[int] = deque(maxlen=_LEAK_EPOCHS)  # allocated bytes after the last epochs
        self._peak_allocated_bytes = 0

    def observe(self, event: Event) -> None:
        # memory that a phase reserved stays reserved in training
        if isinstance(event, Phase):
            self._raise_peak(event)

    def step(self, memory: Memory, step_s: float) -> list[str]:
        self._raise_peak(memory)
        spill, others, fragmentation = self._spill(memory, step_s), self._others(memory), self._fragmentation(memory)
        self._step_s.append(step_s)
        return self._first(spill=spill, others=others, fragmentation=fragmentation)

    def epoch(self, memory: Memory) -> list[str]:
        if memory.allocated_bytes is not None:
            self._levels.append(memory.allocated_bytes)
        grown = self._levels[-1] - self._levels[0] if len(self._levels) == _LEAK_EPOCHS else 0
        if grown <= _LEAK_BYTES or any(after <= before for before, after in itertools.pairwise(self._levels)):
            return []
        text = f"allocated memory has grown by {format_bytes(grown)} over the last {_LEAK_EPOCHS} epochs: a memory leak"
        return self._first(leak=text)

    def _raise_peak(self, memory: Memory) -> None:
        self._peak_allocated_bytes = max(self._peak_allocated_bytes, memory.peak_allocated_bytes or 0)

    def _first(self, **warnings: str) -> list[str]:
        new = {kind: text for kind, text in warnings.items() if text and kind not in self._warned}
        self._warned.update(new)
        return [*new.values()]

    def _spill(self, memory: Memory, step_s: float) -> str:
        reserved, total, others = memory.reserved_bytes, memory.card_total_bytes, memory.other_processes_bytes or 0
        if not self._may_spill or reserved is None or total is None or reserved + others <= total:
            return ""
        slow = len(self._step_s) >= 5 and step_s > _SLOW_FACTOR * statistics.median(self._step_s)
        speed = f"; this step took {step_s:.1f} s, the median is {statistics.median(self._step_s):.1f} s" if slow else ""
        used = f"{format_bytes(reserved + others)} are in use on a GPU with {format_bytes(total)}"
        fix = "Set 'Prefer No Sysmem Fallback' in the NVIDIA control panel, or plan with a smaller memory_budget"
        return f"{used}: the driver spills to host memory{speed}. {fix}"

    def _others(self, memory: Memory) -> str:
        others = memory.other_processes_bytes
        if others is None:
            return ""
        if self._others_bytes is None:
            self._others_bytes = others
        grown = others - self._others_bytes
        if grown < _OTHERS_GREW_BYTES:
            return ""
        return f"other programs use {format_bytes(grown)} more GPU memory than when this run started"

    def _fragmentation(self, memory: Memory) -> str:
        reserved = memory.peak_reserved_bytes
        if reserved is None:
            return ""
        unused = reserved - self._peak_allocated_bytes
        if unused < _FRAGMENTED_BYTES or unused < _FRAGMENTED_SHARE * reserved:
            return ""
        return (
            f"fragmentation: {format_bytes(unused)} of {format_bytes(reserved)} reserved memory were never allocated; "
            "packing=true or examples of similar length reduce it"
        )
