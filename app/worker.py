"""A worker: a module of this package in a separate process, which answers calls one at a time.

    planner = Worker(workspace, ".planning.process", log=path)
    planner.call("plan", recipe=text, report=print, newest=True)

Each message is a line of JSON. `{"number", "method", "values"}` and `{"cancel": number}` go to the process. For each call
there may come `{"report": value}`, and then one of `{"result": value}`, `{"error": values}` and `{"cancelled": true}`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import FinetuneError
from finetune.gc_settings import raise_gc_thresholds
from finetune.privacy import keep_private

from .process import command, environment

if TYPE_CHECKING:
    from .workspace import Workspace

Report = Callable[[Any], None]


class WorkerError(FinetuneError):
    """An error that a worker reported, or its end; `title` is the kind."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values["problems"], values["fix"])
        self.title, self.exit_code = values["title"], values["exit_code"]


class SupersededError(Exception):
    """The call was cancelled: nobody waits for its answer."""


class Worker:
    """Starts the process at the first call, and again if it has ended. Calls of several threads wait for one another.

    `silent_s`: seconds without a message after which the process is killed. `tries`: how often a call is sent to a process
    that ends without an answer, as when the kernel kills it for its memory.
    """

    def __init__(
        self, workspace: Workspace, module: str, *arguments: str, log: Path, silent_s: float | None = None, tries: int = 2
    ) -> None:
        self._root, self._command, self._log = workspace.root, command(module, *arguments), log
        self._silent_s, self._tries = silent_s, tries
        self._process: subprocess.Popen[str] | None = None
        self._calling, self._writing = threading.Lock(), threading.Lock()
        self._numbers, self._is_closed = itertools.count(1), False
        #: Number and method of the call that is being answered.
        self._running = (0, "")
        #: Method -> number of its newest call.
        self._newest: dict[str, int] = {}
        #: What the running call last said that it does.
        self.doing = ""

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def call(self, method: str, *, report: Report | None = None, newest: bool = False, **values: Any) -> Any:
        """The result of a method of the process. `report` gets its progress.

        `newest`: cancels an earlier such call of the method. Raises WorkerError, and SupersededError for a cancelled call.
        """
        number = next(self._numbers)
        if newest:
            older, self._newest[method] = self._newest.get(method, 0), number
            if self._running[0] == older:
                self.cancel(method)
        with self._calling:
            self._running = number, method  # before it is compared: a newer call sees this number, or is seen here
            try:
                if newest and number < self._newest[method]:
                    raise SupersededError
                return result_of(self._answer({"number": number, "method": method, "values": values}, report))
            finally:
                self._running, self.doing = (0, ""), ""

    def cancel(self, method: str) -> None:
        """Cancel the call that is being answered if it is one of `method`; it ends at its next report."""
        number, running = self._running
        if running == method and self._process is not None:
            with contextlib.suppress(OSError, ValueError):  # the process has ended, and with it the call
                self._send(self._process, {"cancel": number})

    def close(self) -> None:
        """End the process. A call that is being answered fails."""
        self._is_closed = True
        self._end()

    def _answer(self, message: dict[str, Any], report: Report | None) -> dict[str, Any]:
        for _ in range(self._tries):
            if not self._is_closed and (answer := self._ask(message, report)):
                return answer
            self._end()
            self.doing = "the process was killed and is started again"
        values = {"title": "The process has ended", "problems": ["the process was killed, perhaps because memory is short"]}
        return {"error": {**values, "fix": f"Try again; a new process is started. Its output: {self._log}", "exit_code": 1}}

    def _ask(self, message: dict[str, Any], report: Report | None) -> dict[str, Any]:
        """The answer of the process; empty where it ends without one."""
        try:
            process = self._started()
            self._send(process, message)
            while "report" in (answer := self._read(process)):
                if isinstance(answer["report"], str):
                    self.doing = answer["report"]
                if report is not None:
                    report(answer["report"])
            return answer
        except (OSError, ValueError):  # the process has closed a pipe, perhaps within a line
            return {}

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or not self.is_alive:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=self._root, text=True,
                    encoding="utf-8", env=environment(),
                )  # fmt: skip
        return self._process

    def _send(self, process: subprocess.Popen[str], message: dict[str, Any]) -> None:
        with self._writing:
            assert process.stdin is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """The next message; empty when the process ended, or was silent for too long."""
        assert process.stdout is not None
        deadline = threading.Timer(self._silent_s or 0, process.kill)
        if self._silent_s:
            deadline.start()
        try:
            return dict(json.loads(process.stdout.readline() or "{}"))
        finally:
            deadline.cancel()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def result_of(answer: dict[str, Any]) -> Any:
    """The result in an answer. Raises WorkerError and SupersededError."""
    if "cancelled" in answer:
        raise SupersededError
    if "error" in answer:
        raise WorkerError(answer["error"])
    return answer["result"]


@dataclass(frozen=True)
class Work:
    """The call that a method answers: sends its progress, and says whether the caller still waits."""

    send: Report = lambda _: None
    is_cancelled: Callable[[], bool] = lambda: False

    def report(self, value: Any) -> None:
        """Send a value to the caller. Raises SupersededError when the call was cancelled."""
        if self.is_cancelled():
            raise SupersededError
        self.send(value)


def answer_of(target: object, method: str, values: dict[str, Any], work: Work) -> dict[str, Any]:
    """The answer of one method of `target`; errors are answers, too."""
    try:
        return {"result": getattr(target, method)(work, **values)}
    except SupersededError:
        return {"cancelled": True}
    except FinetuneError as error:
        return {"error": {**error.as_json(), "title": error.title}}
    except Exception as error:  # noqa: BLE001 - the page shows it, and the process answers the next call
        traceback.print_exc()
        problems = [f"{type(error).__name__}: {error}"]
        return {"error": {"title": "Internal error", "problems": problems, "fix": "", "exit_code": 1}}


class _Inbox:
    """Calls from standard input, read by a thread, so that the one being answered can be cancelled."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._cancelled, self._is_closed = 0, False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if "cancel" in message:
                self._cancelled = message["cancel"]
            else:
                self._calls.put(message)
        self._is_closed = True
        self._calls.put(None)

    def next(self, wait_s: float | None) -> dict[str, Any] | None:
        """The next call; None at the end of the app, or after `wait_s` without one."""
        try:
            return self._calls.get(timeout=wait_s)
        except queue.Empty:
            return None

    def is_cancelled(self, number: int) -> bool:
        return self._is_closed or self._cancelled == number


def serve(target: object, idle_s: float | None = None) -> None:
    """Answer calls with the methods of `target` until the app ends, or nobody has called for `idle_s`."""
    keep_private()
    raise_gc_thresholds()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # libraries print, too

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message, default=str) + "\n")

    inbox = _Inbox()
    while call := inbox.next(idle_s):
        number = call["number"]
        work = Work(lambda value: send({"report": value}), lambda: inbox.is_cancelled(number))  # noqa: B023
        send(answer_of(target, call["method"], call["values"], work))
