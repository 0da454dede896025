"""Work on batches in forks of this process, which have its libraries and tokenizer already."""

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

from finetune import errors
from finetune.errors import FinetuneError, OutOfMemory
from finetune.garbage import collect_rarely

#: More processes than this read no faster: one process hands out the rows.
_MOST = 8


def usable_processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


class Workers:
    """`work` in forks; in this process where there is one processor, or no fork that libraries survive (macOS, Windows).

    Each fork has one task at a time. They end when this process does, however that is: their pipe closes.
    """

    def __init__(self, work: Callable[..., Any]) -> None:
        self._work = work
        self._forks: list[Connection] = []
        self._free: list[Connection] = []
        self._processes: list[Any] = []
        count = min(usable_processors(), _MOST)
        for _ in range(count if count > 1 and sys.platform == "linux" else 0):
            here, there = get_context("fork").Pipe()
            process = get_context("fork").Process(target=_serve, args=(there, [*self._forks, here], work), daemon=True)
            with warnings.catch_warnings():  # of threads that the fork lacks: those of a status line, which it does not use
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            there.close()
            self._forks.append(here)
            self._free.append(here)
            self._processes.append(process)

    def hand(self, *task: Any) -> Iterator[Any]:
        """Start a task; yields the results that are ready, in any order. Waits only while all are busy."""
        if not self._forks:
            yield self._work(*task)
            return
        yield from self._collect(0 if self._free else None)
        connection = self._free.pop()
        connection.send(task)

    def rest(self) -> Iterator[Any]:
        """The results of all tasks that are not done yet."""
        while len(self._free) < len(self._forks):
            yield from self._collect(None)

    def close(self) -> None:
        """End the forks."""
        for process in self._processes:
            process.kill()
            process.join()

    def _collect(self, timeout_s: float | None) -> Iterator[Any]:
        busy = [connection for connection in self._forks if connection not in self._free]
        for connection in wait(busy, timeout_s) if busy else []:
            assert isinstance(connection, Connection)
            try:
                result = connection.recv()
            except (EOFError, ConnectionResetError):
                raise OutOfMemory(
                    "a process that tokenises rows was killed; the machine may be out of memory",
                    "Run the command again: it goes on where it was.",
                ) from None
            self._free.append(connection)
            if isinstance(result, _Failed):
                raise result.error()
            yield result


class _Failed:
    """An error of a fork, in a form that can be sent."""

    def __init__(self, error: Exception) -> None:
        self._told = (type(error).__name__, error.problems, error.fix) if isinstance(error, FinetuneError) else None
        self._other = None if self._told else error

    def error(self) -> Exception:
        if self._told is None:
            return self._other or RuntimeError()
        name, problems, fix = self._told
        return getattr(errors, name, FinetuneError)(problems, fix)


def _serve(tasks: Connection, others: list[Connection], work: Callable[..., Any]) -> None:
    """Work until the pipe closes. `others`: ends that belong to the process which hands out tasks."""
    for connection in others:
        connection.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)
    gc.freeze()
    collect_rarely()
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
        except Exception as error:  # noqa: BLE001 - raised where the task came from
            tasks.send(_Failed(error))
