"""Forks of the test process: workers, and work that is killed at moments of what it does to files."""

import gc
import os
import signal
import sys
import traceback
from pathlib import Path

#: Audit events of what changes a folder or another process: https://docs.python.org/3/library/audit_events.html
_CHANGES = {"os.kill", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}


def start_worker(run, fault=None):
    """Start a run's worker in a fork, which keeps what this process has replaced, after `fault()`; returns its process id."""
    gc.freeze()  # or every child's collector would scan all of pytest's objects
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        log = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if fault:
            fault()
        from finetune.run.worker import Worker

        code = Worker(run).main()
    except BaseException:  # noqa: BLE001 - a child must never return into pytest
        traceback.print_exc()
    finally:
        os._exit(code)


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
