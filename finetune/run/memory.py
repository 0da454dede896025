"""Memory of the training process: torch's allocator, the whole GPU, host memory (RSS)."""

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
    """Samples memory in well under a millisecond."""

    def __init__(self, on_cuda: bool) -> None:
        self._process = psutil.Process()
        self._on_cuda = on_cuda

    @cached_property
    def _gpu(self) -> OpenDevice | None:
        with contextlib.suppress(DriverError):
            return nvidia.open_device(cuda.uuid()) if self._on_cuda else None
        return None

    def sample(self) -> Memory:
        """Return current bytes, and peak bytes since `reset_peak`."""
        return Memory(
            process_rss_bytes=self._process.memory_info().rss, process_peak_rss_bytes=peak_rss_bytes(),
            **(cuda.allocator_bytes() if self._on_cuda else {}), **(_whole_gpu(self._gpu) if self._gpu else {}),
        )  # fmt: skip

    def sensors(self) -> dict[str, Any]:
        values, gpu = {}, self._gpu
        if gpu is not None:
            for name, read in {"temperature_c": gpu.temperature_c, "power_w": gpu.power_w}.items():
                with contextlib.suppress(DriverError):  # not every GPU has every sensor
                    values[name] = read()
        return values

    def reset_peak(self) -> None:
        if self._on_cuda:
            cuda.reset_peak()


def _whole_gpu(device: OpenDevice) -> dict[str, int | None]:
    try:
        total, _, used = device.memory()
    except DriverError:
        return {}
    other_processes_bytes, bytes_by_pid = None, None
    with contextlib.suppress(DriverError):
        bytes_by_pid = device.memory_of_processes()
    if bytes_by_pid and os.getpid() in bytes_by_pid:  # in a container the driver reports the host's process ids
        sizes = [size for pid, size in bytes_by_pid.items() if pid != os.getpid()]
        other_processes_bytes = None if None in sizes else sum(size or 0 for size in sizes)
    # without the driver's reserve, as torch counts
    return {"card_used_bytes": used, "card_total_bytes": total, "other_processes_bytes": other_processes_bytes}
