"""Asks the planner process about data and plans, so that the app itself imports no torch and opens no GPU."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import threading
import time
from typing import Any

from finetune.errors import FinetuneError

from ..process import start_helper
from ..workspace import Workspace

#: Seconds without output after which the process is ended.
DEADLINE_S = 300.0


class PlannerError(FinetuneError):
    """An error that the planner process reported; `title` is its kind."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values.get("problems", ["the planner gave no answer"]), values.get("fix", ""))
        self.title, self.exit_code = values.get("title", "Something went wrong"), values.get("exit_code", 1)


class SupersededError(Exception):
    """A newer question for a plan was asked, so that nobody waits for this one's answer."""


class Planner:
    """One planner process, one question at a time; it keeps data and forecasts in memory between questions.

    Of questions for a plan the newest wins: it ends the one that is being answered, and those that wait.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._log = workspace.folder("planner") / "log.txt"
        #: The file of plans at other values, made ahead.
        self.outcomes_path = workspace.folder("planner") / "outcomes.jsonl"
        self._process: subprocess.Popen[str] | None = None
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self._numbers, self._newest_plan = itertools.count(1), 0
        #: Progress message of the question that is being answered; empty otherwise.
        self.progress = ""

    def warm(self) -> None:
        """Start the process before the first question, as importing the libraries takes seconds."""
        with self._lock:
            self._running()

    def ask(self, kind: str, **values: Any) -> dict[str, Any]:
        """The answer to a question (see app.planning.process). Raises PlannerError, and SupersededError for a plan."""
        number = next(self._numbers)
        if kind == "plan":
            self._newest_plan = number
            if self._process is not None:
                with contextlib.suppress(OSError, ValueError):  # it has ended: then nothing is being answered
                    self._send(self._process, {"kind": "newest", "number": number})
        with self._lock:
            if kind == "plan" and number < self._newest_plan:
                raise SupersededError
            question, began_s = {"kind": kind, "number": number, **values}, time.monotonic()
            answer = self._ask_process(question)
            if not answer and time.monotonic() - began_s < DEADLINE_S:  # somebody killed it, as the kernel does for memory
                answer = self._ask_process(question)
            if not answer:
                raise PlannerError({"problems": ["the planner ended without an answer"], "fix": f"See {self._log}"})
        if "superseded" in answer:
            raise SupersededError
        if "problems" in answer:
            raise PlannerError(answer)
        return answer

    def _ask_process(self, question: dict[str, Any]) -> dict[str, Any]:
        """The process's answer, which it may need a start for; empty, and the process is gone, where it gives none."""
        process = self._running()
        try:
            self._send(process, question)
            answer = self._answer(process)
            while "progress" in answer:
                self.progress = answer["progress"]
                answer = self._answer(process)
        except (OSError, ValueError):  # it has closed the pipe, perhaps within a line
            answer = {}
        finally:
            self.progress = ""
        if not answer:
            self._end()
        return answer

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = start_helper(self._workspace, ".planning.process", str(self.outcomes_path), log=self._log)
        return self._process

    def _send(self, process: subprocess.Popen[str], message: dict[str, Any]) -> None:
        with self._writing:
            assert process.stdin is not None
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()

    def _answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        """The next line, empty when the process ended, or was silent for too long."""
        assert process.stdout is not None
        deadline = threading.Timer(DEADLINE_S, process.kill)
        deadline.start()
        try:
            return dict(json.loads(process.stdout.readline() or "{}"))
        finally:
            deadline.cancel()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
