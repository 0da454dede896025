"""Memory of the training process: torch's allocator with its history, the whole GPU, host memory (RSS)."""

from __future__ import annotations

import contextlib
import os
import time
from functools import cached_property
from typing import Any

import psutil

from finetune.card import cuda, nvidia
from finetune.card.nvidia import DriverError, OpenDevice
from finetune.events import Memory
from finetune.printable import Progress
from finetune.run.directory import RunDirectory
from finetune.run.state import is_alive
from finetune.system import peak_rss_bytes, replace

_MOST_ENTRIES = 100_000
_FIRST_STEP = 2  # first step to write: from step 2 on optimizer states are in memory
_HIGHER_PEAK = 1.01  # a new file needs a peak higher by this factor
_POLL_S = 0.2


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
            sensors = {"temperature_c": gpu.temperature_c, "power_w": gpu.power_w, "gpu_utilisation": gpu.utilisation}
            for name, read in sensors.items():
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


class MemoryHistory:
    """Records allocations with their stacks for PyTorch's viewer; writes them at peaks, on request and at the end."""

    # costs a few per cent of time and some host memory

    def __init__(self, run: RunDirectory, warn: Progress, *, records: bool) -> None:
        self._run, self._warn, self._records = run, warn, records
        self._peak_bytes = self._written_bytes = 0

    def start(self) -> None:
        if self._records:
            cuda.start_history(_MOST_ENTRIES)

    def after_step(self, memory: Memory, step: int, last_step: int) -> None:
        """Write the history on request, and after the highest peak so far."""
        if not self._records:
            return
        self._peak_bytes = max(self._peak_bytes, memory.peak_allocated_bytes or 0)
        if step >= min(_FIRST_STEP, last_step) and self._peak_bytes > _HIGHER_PEAK * self._written_bytes:
            self._written_bytes = self._peak_bytes
            self.write("peak")
        if self._run.snapshot_request.exists():
            self.write("now")
            self._run.snapshot_request.unlink(missing_ok=True)

    def end(self) -> None:
        self.write("end")
        self._run.snapshot_request.unlink(missing_ok=True)

    def write(self, moment: str) -> None:
        if not self._records:
            return
        path = self._run.snapshot(moment)
        partial = path.with_suffix(".partial")
        try:
            cuda.write_history(str(partial))
            replace(partial, path)
        except OSError as error:
            self._warn(f"the allocator's history could not be written: {error.strerror or error}")
        finally:
            partial.unlink(missing_ok=True)


def request_history(run: RunDirectory, deadline_s: float, progress: Progress) -> bool:
    """Request the allocator history of a living run and wait for the file; return False after the deadline."""
    run.snapshot_request.touch()
    deadline = time.monotonic() + deadline_s
    while run.snapshot_request.exists():
        if not is_alive(run):
            run.snapshot_request.unlink(missing_ok=True)
        elif time.monotonic() > deadline:
            return False
        else:
            progress("waiting for the end of the run's step")
            time.sleep(_POLL_S)
    return True
