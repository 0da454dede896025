"""Run batches in forks of this process, which share its libraries and tokenizer."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterable
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


def results_in_forks(work: Callable[..., Any], tasks: Iterable[tuple[Any, ...]]) -> Generator[Any, None, None]:
    """Yield `work(*task)` of each task, in any order. Closing ends the forks."""
    # macOS and Windows can't fork safely
    count = min(usable_cpus(), _MAX_PROCESSES) if sys.platform == "linux" else 1
    # the first task runs here, so that an error of all tasks comes before the forks
    remaining = iter(tasks)
    yield from itertools.starmap(work, itertools.islice(remaining, 1 if count > 1 else None))
    second = [*itertools.islice(remaining, 1)]
    processes: dict[Connection, Any] = {}
    try:
        for _ in range(count if second else 0):
            parent_end, child_end = get_context("fork").Pipe()
            arguments = (child_end, [*processes, parent_end], work)
            process = get_context("fork").Process(target=_serve, args=arguments, daemon=True)
            # the fork lacks other threads, such as the status line's, and doesn't need them
            with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
                process.start()
            child_end.close()
            processes[parent_end] = process
        idle, remaining = [*processes], itertools.chain(second, remaining)
        while True:
            for task in itertools.islice(remaining, len(idle)):
                idle.pop().send(task)
            busy = [connection for connection in processes if connection not in idle]
            if not busy:
                return
            for connection in wait(busy):
                assert isinstance(connection, Connection)
                try:
                    result = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise OutOfMemory(
                        "a process that tokenises rows was killed; the machine may be out of memory",
                        "Close other programs, and run the command again.",
                    ) from None
                if isinstance(result, Exception):
                    raise result
                idle.append(connection)
                yield result
    finally:
        for process in processes.values():
            process.kill()
            process.join()


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
