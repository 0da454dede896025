"""Commands of `finetune` on results, and `finetune doctor`, as detached processes."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from finetune.errors import CommandError
from finetune.files import parse_json, read_object, write_json
from finetune.run.directory import RunDirectory
from finetune.run.state import is_recorded_process, process_record
from finetune.system import shell_join

from ..worker import detach
from ..workspace import Workspace


@dataclass(frozen=True)
class Task:
    """One command on one run."""

    path: Path

    def status(self) -> dict[str, Any] | None:
        # None: never started
        values = read_object(self.path / "status.json")
        if values and values["state"] == "running" and not is_recorded_process(values["process"]):
            result = self.result()
            # without a result the process was killed
            return {**values, "state": "failed" if result is None or "problems" in result else "done"}
        return values

    @property
    def is_running(self) -> bool:
        return (self.status() or {}).get("state") == "running"

    def output(self) -> str:
        with contextlib.suppress(FileNotFoundError), (self.path / "output.txt").open("rb") as file:
            return file.read(2**26).decode("utf-8", "replace")
        return ""

    def result(self) -> dict[str, Any] | None:
        # a command prints its JSON result last, after its progress
        for line in reversed(self.output().split("\n")):
            with contextlib.suppress(ValueError):
                if line.startswith("{"):
                    return dict(parse_json(line))
        return None

    def end(self) -> bool:
        status = self.status()
        if status is None or status["state"] != "running":
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(status["process"]["pid"])
            for member in [*process.children(recursive=True), process]:
                member.terminate()
        return True


class Tasks:
    """Tasks by run and command."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def of(self, run: RunDirectory, verb: str) -> Task:
        return Task(self._workspace.folder("tasks") / run.path.name / verb)

    def start(self, run: RunDirectory, verb: str, options: Sequence[str] = ()) -> None:
        """Start a command. Raises CommandError."""
        task = self.of(run, verb)
        if task.is_running:
            raise CommandError(f"finetune {verb} is already running on {run.path.name}")
        self.begin(task, verb, str(run.path), *options, "--json")

    def begin(self, task: Task, *arguments: str) -> None:
        task.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        output = task.path / "output.txt"
        output.write_bytes(b"")
        process = detach(self._workspace.root, [sys.executable, "-P", "-m", "finetune", *arguments], output)
        status = {"state": "running", "command": f"finetune {shell_join([*arguments])}", "began_s": time.time()}
        write_json(task.path / "status.json", {**status, "process": process_record(process)})
