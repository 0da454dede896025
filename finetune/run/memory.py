"""Measures memory of the training process: torch's allocator, the whole GPU as its driver reports it, and host memory (RSS)."""

from __future__ import annotations

import contextlib
import os
from functools import cached_property
from typing import Any

import psutil

from finetune.card import cuda
from finetune.card.vendor import DriverError, OpenDevice
from finetune.card.vendors import current_vendor
from finetune.events import Memory
from finetune.system import peak_rss_bytes


class MemorySampler:
    """Samples memory in well under a millisecond: RSS, and on CUDA the allocator and the whole card."""

    def __init__(self, on_cuda: bool) -> None:
        self._process = psutil.Process()
        self._on_cuda = on_cuda

    @cached_property
    def _card(self) -> _WholeGpu | None:
        return _WholeGpu() if self._on_cuda else None

    def sample(self) -> Memory:
        """Bytes now and at the peak since `reset_peak`."""
        return Memory(
            process_rss_bytes=self._process.memory_info().rss, process_peak_rss_bytes=peak_rss_bytes(),
            **(cuda.allocator_bytes() if self._on_cuda else {}), **(self._card.sample() if self._card is not None else {}),
        )  # fmt: skip

    def sensors(self) -> dict[str, Any]:
        """Temperature and power of the card; null on a CPU."""
        return self._card.sensors() if self._card is not None else {"temperature_c": None, "power_w": None}

    def reset_peak(self) -> None:
        """Reset the peak; each step and phase has its own."""
        if self._on_cuda:
            cuda.reset_peak()


class _WholeGpu:
    """The whole GPU; values that the driver does not report are null."""

    def __init__(self) -> None:
        self._device: OpenDevice | None = None
        with contextlib.suppress(DriverError):
            self._device = current_vendor().open_device(cuda.uuid())

    def sample(self) -> dict[str, int | None]:
        """Bytes as torch sees the card: the driver's reserve is in neither of them."""
        if self._device is None:
            return {}
        try:
            total, _, used = self._device.memory()
        except DriverError:
            return {}
        others = _other_processes_bytes(self._device)
        return {"card_used_bytes": used, "card_total_bytes": total, "other_processes_bytes": others}

    def sensors(self) -> dict[str, float | None]:
        values: dict[str, float | None] = {"temperature_c": None, "power_w": None}
        if self._device is None:
            return values
        try:
            values["temperature_c"] = self._device.temperature_c()
            values["power_w"] = self._device.power_w()
        except DriverError:
            return values
        return values


def _other_processes_bytes(device: OpenDevice) -> int | None:
    """Bytes of other processes, compute and graphics; None when one is unknown, or this process isn't among them."""
    try:
        bytes_by_pid = device.memory_of_processes()
    except DriverError:
        return None
    if bytes_by_pid is None or os.getpid() not in bytes_by_pid:  # ids of a container's host
        return None
    others = [size for pid, size in bytes_by_pid.items() if pid != os.getpid()]
    return None if any(size is None for size in others) else sum(size or 0 for size in others)
