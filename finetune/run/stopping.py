"""Requests to stop a run: signals, and on Windows, which can't send them, lines of a file that the run's processes read.

The first one creates the file, also where a signal is sent: the second ends a run at once, and two commands may ask together.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from finetune.system import WINDOWS

if TYPE_CHECKING:
    from finetune.run.directory import RunDirectory


def ask(run: RunDirectory, pid: int, number: int) -> None:
    """Ask the process `pid` of a run to stop; `number`: the signal, which its exit status will tell."""
    if WINDOWS:  # os.kill would end it at once
        with run.stop_requests.open("ab") as file:
            file.write(f"{number}\n".encode())
    else:
        os.kill(pid, number)


def is_first(run: RunDirectory) -> bool:
    """Whether nobody has asked this run to stop since its start; true for one caller only."""
    try:
        run.stop_requests.open("xb").close()
    except FileExistsError:
        return False
    except OSError:  # a full disk: better asked twice than never
        return True
    return True


def asked(run: RunDirectory) -> list[int]:
    """The requests in the run's file, oldest first, as numbers of signals."""
    try:
        return [int(line) for line in run.stop_requests.read_bytes().splitlines() if line.isdigit()]
    except OSError:
        return []


def forget(run: RunDirectory) -> None:
    """Remove requests that an earlier start of the run obeyed."""
    run.stop_requests.unlink(missing_ok=True)
