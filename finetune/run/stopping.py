"""Stop requests: lines of a file, which the supervisor and the training process read."""

from __future__ import annotations

import contextlib
import signal

from finetune.run.directory import RunDirectory


def request_stop(run: RunDirectory, number: int, *, again: bool = False) -> bool:
    """Request a stop, only the first time unless `again`; the signal's `number` sets the exit status. Raises OSError."""
    # a second request ends a run immediately: of two commands only one creates the file
    with contextlib.suppress(FileExistsError), run.stop_requests.open("ab" if again else "xb", buffering=0) as file:
        with contextlib.suppress(OSError):  # a full disk: an empty file is a request, too
            file.write(f"{number}\n".encode())
        return True
    return False


def read_stop_requests(run: RunDirectory) -> list[int]:
    """Return the signal numbers in the run's file."""
    try:
        return [int(line) for line in run.stop_requests.read_bytes().split()] or [signal.SIGTERM]
    except (OSError, ValueError):
        return []
