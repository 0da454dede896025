"""Kills forks of the test process at moments of what they do to files: what they wrote since then, they never wrote."""

import gc
import os
import signal
import sys
from pathlib import Path

#: Audit events of what changes a folder or another process: https://docs.python.org/3/library/audit_events.html
_CHANGES = {"os.kill", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}


def forked(work, below, at=None):
    """Run `work` in a fork that is killed before operation `at`; returns its operations below a folder, a letter for each.

    `c`: something is changed, or opened for writing; `r`: something is opened for reading.
    """
    reader, writer = os.pipe()
    gc.freeze()
    pid = os.fork()
    if not pid:
        count = [0]

        def heard(event, arguments):
            if event == "open":
                letter = b"c" if (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR) else b"r"
            elif event in _CHANGES:
                letter = b"c"
            else:
                return
            if event != "os.kill" and below not in (Path.cwd() / str(arguments[0])).parents:
                return
            if count[0] == at:
                signal.raise_signal(signal.SIGKILL)
            count[0] += 1
            os.write(writer, letter)

        sys.addaudithook(heard)
        code = 99
        try:
            code = work()
        finally:
            os._exit(code or 0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        operations = file.read().decode()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code == (0 if at is None else -signal.SIGKILL), f"{code} at operation {at} of {operations}"
    return operations


def moments(operations, most=10):
    """Numbers of operations: of all that change something, or `most` of these evenly; then of those that read."""
    chosen = []
    for letter in "cr":
        numbers = [number for number, operation in enumerate(operations) if operation == letter]
        wanted = min(most - len(chosen), len(numbers))
        chosen += [numbers[index * len(numbers) // wanted] for index in range(wanted)]
    return chosen
