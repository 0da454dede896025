"""Forks of the test process, which has imported: workers, and work that is killed at moments of what it does to files."""

import gc
import os
import signal
import sys
import time
import traceback
from pathlib import Path

#: Audit events of what changes a folder or another process: https://docs.python.org/3/library/audit_events.html
_CHANGES = {"os.kill", "os.link", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}


class Forked:
    """A function in a forked process, with the interface of subprocess.Popen."""

    def __init__(self, function, log, environment=None, new_session=False):
        gc.freeze()  # or every child's collector would scan all of pytest's objects
        self.returncode = None
        self.pid = os.fork()
        if self.pid:
            return
        code = 99
        try:
            if new_session:
                os.setsid()
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            if environment is not None:
                os.environ.clear()
                os.environ.update(environment)
            code = function()
        except BaseException:  # noqa: BLE001 - a child must never return into pytest
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self):
        while self.poll() is None:
            time.sleep(0.01)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def start_worker(run, fault=None):
    """Start a run's worker in a fork, which keeps what this process has replaced, after `fault()`; returns its process id."""

    def work():
        if fault:
            fault()
        from finetune.run.worker import Worker

        return Worker(run).main()

    with run.log.open("ab") as log:
        return Forked(work, log).pid


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
