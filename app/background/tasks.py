"""Commands on results and `finetune doctor`, as detached processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
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

#: Commands of `finetune` on a run's result.
VERBS = ("eval", "merge", "export", "report", "compare", "push")


@dataclass(frozen=True)
class Task:
    """One command on one run."""

    path: Path

    def status(self) -> dict[str, Any] | None:
        # None: never started
        values = read_object(self.path / "status.json")
        if values and values["state"] == "running" and not is_recorded_process(values["process"]):
            # the process was killed before it could write its end
            return {**values, "state": "failed", "exit_code": None}
        return values

    @property
    def is_running(self) -> bool:
        return (self.status() or {}).get("state") == "running"

    def output(self) -> str:
        return _read(self.path / "output.txt")

    def log(self) -> str:
        return _read(self.path / "log.txt")

    def result(self) -> Any:
        # a command prints its JSON result last
        for line in reversed(self.output().strip().split("\n")):
            try:
                return parse_json(line)
            except ValueError:
                continue
        return None

    def end(self) -> bool:
        status = self.status()
        if status is None or status["state"] != "running":
            return False
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(status["process"]["pid"])
            # the children run the command: their parent then writes the end
            for child in process.children(recursive=True) or [process]:
                child.terminate()
        return True


class Tasks:
    """Starts commands on results."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def of(self, run: RunDirectory, verb: str) -> Task:
        return Task(self._workspace.folder("tasks") / run.path.name / verb)

    def start(self, run: RunDirectory, verb: str, options: Sequence[str] = ()) -> Task:
        """Start a command. Raises CommandError."""
        if verb not in VERBS:
            raise CommandError(f"{verb[:40]!r} is not a command on a result")
        task = self.of(run, verb)
        if task.is_running:
            raise CommandError(f"finetune {verb} is already running on {run.path.name}")
        self.begin(task, verb, str(run.path), *options, "--json")
        return task

    def begin(self, task: Task, *arguments: str) -> None:
        task.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("output.txt", "log.txt"):
            (task.path / name).write_bytes(b"")
        status = {"state": "running", "command": f"finetune {shell_join([*arguments])}", "began_s": time.time()}
        process = detach(self._workspace.root, ".background.tasks", str(task.path), *arguments, log=task.path / "log.txt")
        write_json(task.path / "status.json", {**status, "process": process_record(process)})


def _read(path: Path, most: int = 2**26) -> str:
    try:
        with path.open("rb") as file:
            return file.read(most).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""


def main() -> int:
    """Run a command: `python -m app.background.tasks FOLDER VERB RUN ...`"""
    task, arguments = Task(Path(sys.argv[1])), sys.argv[2:]
    status = {**(task.status() or {}), "process": process_record(os.getpid())}
    write_json(task.path / "status.json", status)
    with (task.path / "output.txt").open("wb") as output:
        code = subprocess.run([sys.executable, "-P", "-m", "finetune", *arguments], stdout=output, check=False).returncode
    ended = {"state": "done" if code == 0 else "failed", "exit_code": code, "ended_s": time.time()}
    write_json(task.path / "status.json", {**status, **ended})
    return code


if __name__ == "__main__":
    sys.exit(main())
