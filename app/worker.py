"""Child processes that answer calls, and the environment of every child process.

    planner = Worker(folder, ".planning", log=path)
    planner.call("plan", recipe=text, report=print)

Calls from several threads wait for each other.
"""

from __future__ import annotations

import contextlib
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
from typing import Any

from finetune.errors import FinetuneError
from finetune.system import SETTINGS, keep_private, raise_gc_thresholds


def module_command(module: str, *arguments: str) -> list[str]:
    """Return the command that runs a module of this package, such as `.chats`."""
    # -P: a folder called app or finetune in the user's folder must not be imported
    return [sys.executable, "-P", "-m", f"{__package__}{module}", *arguments]


def child_environment() -> dict[str, str]:
    """Return the environment variables of a child process."""
    # a child needs neither the page's token nor its folder of uploads
    values = {key: value for key, value in os.environ.items() if key not in ("FINETUNE_UI_TOKEN", "GRADIO_TEMP_DIR")}
    return {**values, **SETTINGS, "TOKENIZERS_PARALLELISM": "false", "PYTHONUTF8": "1"}


# Messages are lines of JSON. To the process: {"number", "method", "values"} and {"cancel": number}. From the process, per call:
# any {"report": value}, then {"result": value}, {"error": values} or {"cancelled": true}.
Report = Callable[[Any], None]


class WorkerError(FinetuneError):
    """The method raised an error, or the process has ended."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values["problems"], values["fix"])
        self.title, self.exit_code = values["title"], values["exit_code"]


class SupersededError(Exception):
    """The call was cancelled."""


class Worker:
    """Calls methods in a child process, one call at a time."""

    def __init__(
        self, root: Path, module: str, *arguments: str, log: Path, silent_s: float | None = None, tries: int = 2
    ) -> None:
        self._root, self._command, self._log = root, module_command(module, *arguments), log
        # silent_s: the process is killed when it has sent nothing for so long
        # tries: how often a call is sent, as the kernel may kill the process when memory is short
        self._silent_s, self._tries = silent_s, tries
        self._process: subprocess.Popen[str] | None = None
        self._call_lock, self._write_lock = threading.Lock(), threading.Lock()
        self._is_closed = False
        #: Number and method of the running call.
        self._call_number, self._running_method = 0, ""
        #: Newest progress of the running call.
        self.doing = ""

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def call(
        self, method: str, *, report: Report = lambda _: None, is_wanted: Callable[[], bool] = lambda: True, **values: Any
    ) -> Any:
        """Return a method's result, unless it is unwanted when its turn comes. Raises WorkerError or SupersededError."""
        with self._call_lock:
            self._call_number, self._running_method = self._call_number + 1, method
            try:
                if not is_wanted():
                    raise SupersededError
                return result_of(self._answer({"number": self._call_number, "method": method, "values": values}, report))
            finally:
                self._running_method = self.doing = ""

    def cancel(self, method: str) -> None:
        # the call ends at its next report
        if self._running_method == method and self._process is not None:
            with contextlib.suppress(OSError, ValueError):  # the process has ended, and with it the call
                self._send(self._process, {"cancel": self._call_number})

    def close(self) -> None:
        self._is_closed = True
        self._end()

    def _answer(self, message: dict[str, Any], report: Report) -> dict[str, Any]:
        for _ in range(self._tries):
            # an error or an empty answer: the process has ended, perhaps within a line
            with contextlib.suppress(OSError, ValueError):
                if not self._is_closed and (answer := self._ask(message, report)):
                    return answer
            self._end()
            self.doing = "the process was killed and is started again"
        values = {"title": "The process has ended", "problems": ["the process was killed, perhaps because memory is short"]}
        return {"error": {**values, "fix": f"Try again; a new process is started. Its output: {self._log}", "exit_code": 1}}

    def _ask(self, message: dict[str, Any], report: Report) -> dict[str, Any]:
        if self._process is None or not self.is_alive:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=self._root, text=True,
                    encoding="utf-8", env=child_environment(),
                )  # fmt: skip
        process = self._process
        self._send(process, message)
        while "report" in (answer := self._read(process)):
            if isinstance(answer["report"], str):
                self.doing = answer["report"]
            report(answer["report"])
        return answer

    def _send(self, process: subprocess.Popen[str], message: dict[str, Any]) -> None:
        with self._write_lock:
            assert process.stdin is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def _read(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        # killing a silent process ends readline with an empty line
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
    """Return the result in an answer. Raises WorkerError or SupersededError."""
    if "cancelled" in answer:
        raise SupersededError
    if "error" in answer:
        raise WorkerError(answer["error"])
    return answer["result"]


@dataclass(frozen=True)
class Work:
    """A method's link to its caller: progress out, cancellation in."""

    send: Report = lambda _: None
    is_cancelled: Callable[[], bool] = lambda: False

    def report(self, value: Any) -> None:
        """Send a value to the caller. Raises SupersededError."""
        if self.is_cancelled():
            raise SupersededError
        self.send(value)


def call_method(target: object, method: str, values: dict[str, Any], work: Work) -> dict[str, Any]:
    """Call a method of `target`; return the answer as a message."""
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


def serve(target: object, idle_s: float | None = None) -> None:
    """Answer calls with `target`'s methods until the app ends or `idle_s` passes without a call."""
    keep_private()
    raise_gc_thresholds()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # stdout carries answers, and libraries print
    calls: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    cancelled = set[int]()

    def read() -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if "cancel" in message:
                cancelled.add(message["cancel"])
            else:
                calls.put(message)
        os._exit(0)  # the app has ended, and nobody waits for the running call

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message, default=str) + "\n")

    # reads in a thread: a running call can be cancelled
    threading.Thread(target=read, daemon=True).start()
    with contextlib.suppress(queue.Empty):
        while call := calls.get(timeout=idle_s):
            number = call["number"]
            work = Work(lambda value: send({"report": value}), lambda: number in cancelled)  # noqa: B023 - used only in this pass
            send(call_method(target, call["method"], call["values"], work))
