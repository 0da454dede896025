"""Requests to stop a run: signals, and on Windows, which can't send them, lines of a file that the run's processes read.

A line is also written where a signal was sent: a second request ends a run at once, and two commands may ask together.
"""

from __future__ import annotations

import contextlib
import os

from finetune.run.directory import RunDirectory
from finetune.system import WINDOWS, take_lock


def request_stop(run: RunDirectory, pid: int, number: int) -> None:
    """Ask the process `pid` of a run to stop; `number`: the signal, which sets its exit status."""
    if WINDOWS:  # os.kill would end it at once
        with run.stop_requests.open("ab") as file:
            file.write(f"{number}\n".encode())
    else:
        os.kill(pid, number)


def request_stop_once(run: RunDirectory, pid: int, number: int) -> None:
    """Request a stop unless there was a request since the run's start: of several commands one does, if killed the next."""
    lock = None
    with contextlib.suppress(OSError):  # a full disk: better two requests than none
        lock = take_lock(run.stop_lock, wait_s=1)
    try:
        with contextlib.suppress(OSError):  # no request yet
            if run.stop_requests.stat().st_size > 0:
                return
        request_stop(run, pid, number)
        if not WINDOWS:
            with contextlib.suppress(OSError), run.stop_requests.open("ab") as file:
                file.write(b"signalled\n")
    finally:
        if lock is not None:
            lock.release()


def read_stop_requests(run: RunDirectory) -> list[int]:
    """The requests in the run's file, oldest first, as numbers of signals."""
    try:
        return [int(line) for line in run.stop_requests.read_bytes().splitlines() if line.isdigit()]
    except OSError:
        return []
