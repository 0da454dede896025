"""Stop requests: signals, or on Windows, which can't send them, lines of a file."""

from __future__ import annotations

import contextlib
import os

from finetune.run.directory import RunDirectory
from finetune.system import WINDOWS, take_lock


def request_stop(run: RunDirectory, pid: int, signal_number: int) -> None:
    """Request a stop; the signal number sets the exit status."""
    if WINDOWS:  # os.kill would terminate the process immediately
        with run.stop_requests.open("ab") as file:
            file.write(f"{signal_number}\n".encode())
    else:
        os.kill(pid, signal_number)


def request_stop_once(run: RunDirectory, pid: int, signal_number: int) -> None:
    """Request a stop, unless one was requested since the run's start."""
    # A second request ends a run immediately: the lock keeps two commands from both sending one, and is freed if its holder is
    # killed. On Windows the request itself is a line of `stop_requests`; elsewhere a line is added after the signal.
    lock = None
    with contextlib.suppress(OSError):  # a full disk: better two requests than none
        lock = take_lock(run.stop_lock, wait_s=1)
    try:
        with contextlib.suppress(OSError):  # no request yet
            if run.stop_requests.stat().st_size > 0:
                return
        request_stop(run, pid, signal_number)
        if not WINDOWS:
            with contextlib.suppress(OSError), run.stop_requests.open("ab") as file:
                file.write(b"signalled\n")
    finally:
        if lock is not None:
            lock.release()


def read_stop_requests(run: RunDirectory) -> list[int]:
    """Return the signal numbers in the run's file."""
    try:
        return [int(line) for line in run.stop_requests.read_bytes().splitlines() if line.isdigit()]
    except OSError:
        return []
