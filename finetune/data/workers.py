"""Run batches in forks of this process, which share its libraries and tokenizer."""

from __future__ import annotations

import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any

from finetune.errors import OutOfMemory
from finetune.gc_settings import raise_gc_thresholds

#: More processes don't help: one process reads and distributes the rows.
_MAX_PROCESSES = 8


def usable_cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class Workers:
    """Runs `work` in forks, or in this process if it has one CPU or can't fork safely."""

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self._processes: dict[Connection, Any] = {}
        self._idle: list[Connection] = []
        count = min(usable_cpus(), _MAX_PROCESSES)
        # macOS and Windows can't fork safely
        for _ in range(count if count > 1 and sys.platform == "linux" else 0):
            parent_end, child_end = get_context("fork").Pipe()
            arguments = (child_end, [*self._processes, parent_end], work)
            process = get_context("fork").Process(target=_serve, args=arguments, daemon=True)
            # the fork lacks other threads, such as the status line's, and doesn't need them
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                process.start()
            child_end.close()
            self._processes[parent_end] = process
            self._idle.append(parent_end)

    def submit(self, *task: Any) -> Iterator[Any]:
        """Start a task, and yield results that are ready, in any order."""
        if not self._processes:
            yield self._work(*task)
            return
        # waits only while all forks are busy
        yield from self._collect(0 if self._idle else None)
        self._idle.pop().send(task)

    def remaining_results(self) -> Iterator[Any]:
        while len(self._idle) < len(self._processes):
            yield from self._collect(None)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()

    def _collect(self, timeout_s: float | None) -> Iterator[Any]:
        busy = [connection for connection in self._processes if connection not in self._idle]
        for connection in wait(busy, timeout_s) if busy else []:
            assert isinstance(connection, Connection)
            try:
                result = connection.recv()
            except (EOFError, ConnectionResetError):
                raise OutOfMemory(
                    "a process that tokenises rows was killed; the machine may be out of memory",
                    "Run the command again: finished batches are kept.",
                ) from None
            self._idle.append(connection)
            if isinstance(result, Exception):
                raise result
            yield result


def _serve(tasks: Connection, inherited: list[Connection], work: Callable[..., Any]) -> None:
    # a fork exits when its pipe closes, so it must not hold the parent's ends
    for connection in inherited:
        connection.close()
    # Ctrl-C reaches the parent, which ends the forks
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # collecting would copy the pages that forks share
    gc.freeze()
    raise_gc_thresholds()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    while True:
        try:
            task = tasks.recv()
        except (EOFError, OSError):
            return
        try:
            tasks.send(work(*task))
        except BrokenPipeError:
            return
        except Exception as error:  # noqa: BLE001 - raised again in the parent
            tasks.send(error)
