"""CUDA allocator history, as files for PyTorch's viewer (pytorch.org/memory_viz)."""

from __future__ import annotations

import time
from typing import Any

from finetune.card import cuda
from finetune.events import Memory
from finetune.printable import Progress
from finetune.run.directory import RunDirectory
from finetune.run.state import is_alive
from finetune.system import replace

_MOST_ENTRIES = 100_000
#: First step to write: from step 2 on optimizer states are in memory.
_FIRST_STEP = 2
#: A new file needs a peak higher by this factor.
_HIGHER = 1.01
_POLL_S = 0.2


class MemoryHistory:
    """Records allocations with their stacks, and writes the history at peaks, on request and at the end.

    Costs a few per cent of time and some host memory.
    """

    def __init__(self, run: RunDirectory, warn: Progress, *, records: bool) -> None:
        self._run, self._warn, self._records = run, warn, records
        self._peak_bytes = self._written_bytes = 0

    def start(self) -> None:
        if self._records:
            self._run.snapshot_request.unlink(missing_ok=True)
            cuda.start_history(_MOST_ENTRIES)

    def after_step(self, memory: Memory, step: int, last_step: int) -> None:
        """Write the history on request, and after the highest peak so far."""
        if not self._records:
            return
        self._peak_bytes = max(self._peak_bytes, memory.peak_allocated_bytes or 0)
        if step >= min(_FIRST_STEP, last_step) and self._peak_bytes > _HIGHER * self._written_bytes:
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
    """Request the allocator history of a living run; return False after the deadline."""
    run.snapshot_request.touch()
    end = time.monotonic() + deadline_s
    while run.snapshot_request.exists():
        if not is_alive(run):
            run.snapshot_request.unlink(missing_ok=True)
        elif time.monotonic() > end:
            return False
        else:
            progress("waiting for the end of the run's step")
            time.sleep(_POLL_S)
    return True


def allocator_now(on_cuda: bool) -> dict[str, Any]:
    """Return the allocator's snapshot; empty without a GPU."""
    if not on_cuda:
        return {}
    try:
        return cuda.snapshot()
    except RuntimeError:  # after a driver error every CUDA call fails
        return {}
