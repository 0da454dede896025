"""The CUDA allocator's history, as files for PyTorch's viewer (pytorch.org/memory_viz), and its blocks at one moment."""

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
#: The first step whose peak is written: from the second on optimizer states are in memory, too.
_FIRST_STEP = 2
#: A step's peak is higher than that of the last file when it is so by this factor.
_HIGHER = 1.01
_POLL_S = 0.2


class MemoryHistory:
    """Records the allocations of a run with their stacks, for `record_memory_history`, and writes the newest of them: after the
    step with the highest peak, on request of `finetune runs show --memory`, after out of memory, and at the end.

    Costs some host memory and a few per cent of time. `records`: otherwise every method does nothing. `warn` is called if the
    disk is full.
    """

    def __init__(self, run: RunDirectory, warn: Progress, *, records: bool) -> None:
        self._run, self._warn, self._records = run, warn, records
        self._peak_bytes = self._written_bytes = 0

    def start(self) -> None:
        """Record every allocation from now on."""
        if self._records:
            self._run.snapshot_request.unlink(missing_ok=True)
            cuda.start_history(_MOST_ENTRIES)

    def after_step(self, memory: Memory, step: int, last_step: int) -> None:
        """Write the history when no step before had such a peak, and on request."""
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
        """Write the newest allocations, whole or not at all."""
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
    """Ask a living run for its allocator's history, which it writes after its step; False when it has not by the deadline."""
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
    """The allocator's segments and blocks, and its history if recorded; empty without a card, or when it can't be asked."""
    if not on_cuda:
        return {}
    try:
        return cuda.snapshot()
    except RuntimeError:  # after an error of the driver nothing on the card can be used
        return {}
