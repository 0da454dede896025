"""Measures memory of the training process: torch's allocator, the whole GPU as its driver reports it, and host memory (RSS)."""

from __future__ import annotations

import contextlib
import os
from functools import cached_property
from typing import Any

import psutil

from finetune.card import cuda, nvidia
from finetune.card.nvidia import DriverError, OpenDevice
from finetune.events import Memory
from finetune.system import peak_rss_bytes


class MemorySampler:
    """Samples memory in well under a millisecond: RSS, and on CUDA the allocator and the whole card."""

    def __init__(self, on_cuda: bool) -> None:
        self._process = psutil.Process()
        self._on_cuda = on_cuda

    @cached_property
    def _gpu(self) -> OpenDevice | None:
        """The whole GPU; None on a CPU, and where the driver does not answer."""
        with contextlib.suppress(DriverError):
            return nvidia.open_device(cuda.uuid()) if self._on_cuda else None
        return None

    def sample(self) -> Memory:
        """Bytes now and at the peak since `reset_peak`."""
        return Memory(
            process_rss_bytes=self._process.memory_info().rss, process_peak_rss_bytes=peak_rss_bytes(),
            **(cuda.allocator_bytes() if self._on_cuda else {}), **(_whole_gpu(self._gpu) if self._gpu else {}),
        )  # fmt: skip

    def sensors(self) -> dict[str, Any]:
        """Temperature, power and utilisation of the card, where the driver reports them; empty on a CPU."""
        values, gpu = {}, self._gpu
        if gpu is not None:
            sensors = {"temperature_c": gpu.temperature_c, "power_w": gpu.power_w, "gpu_utilisation": gpu.utilisation}
            for name, read in sensors.items():
                with contextlib.suppress(DriverError):
                    values[name] = read()
        return values

    def reset_peak(self) -> None:
        """Reset the peak; each step and phase has its own."""
        if self._on_cuda:
            cuda.reset_peak()


def _whole_gpu(device: OpenDevice) -> dict[str, int | None]:
    """Bytes as torch sees the card: the driver's reserve is in neither of them. Empty where the driver does not report them."""
    try:
        total, _, used = device.memory()
    except DriverError:
        return {}
    return {"card_used_bytes": used, "card_total_bytes": total, "other_processes_bytes": _other_processes_bytes(device)}


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
