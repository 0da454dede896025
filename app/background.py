"""Detached processes that outlive the page: commands on results, and the starts of runs.

`python -m app.background RUNS START run RECIPE ...` and `... START resume RUN` wait for earlier starts and for running runs.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import CommandError, FinetuneError
from finetune.files import parse_json, read_object, write_json
from finetune.recipe import write_recipe
from finetune.run.directory import RunDirectory
from finetune.run.state import is_alive, is_recorded_process, process_record
from finetune.settings import Recipe
from finetune.system import exec_command, keep_private, shell_join, start_detached

from .worker import child_environment
from .workspace import Workspace

OPEN_STATES = ("waiting", "preparing")  # states of a start before it has started or failed
_MOST_ENDED_STARTS = 8  # on disk
_POLL_S = 0.3
_WAITING = "waiting"  # file of a start that waits; removing it cancels the start


@dataclass(frozen=True)
class Task:
    """A detached finetune command, such as `eval RUN`."""

    #: Working folder of the command.
    root: Path
    #: Folder of status.json and output.txt.
    path: Path

    def begin(self, *arguments: str, module: str = "finetune") -> None:
        """Start the command. Raises CommandError if it is running."""
        if (self.status() or {}).get("state") == "running":
            raise CommandError(f"finetune {arguments[0]} is already running")
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        output = self.path / "output.txt"
        output.write_bytes(b"")
        with output.open("ab") as file:
            command = [sys.executable, "-P", "-m", module, *arguments]
            process = start_detached(command, file, cwd=self.root, env=child_environment())
        status = {"state": "running", "command": f"finetune {shell_join([*arguments])}", "began_s": time.time()}
        write_json(self.path / "status.json", {**status, "process": process_record(process.pid)})

    def status(self) -> dict[str, Any] | None:
        # None: never started
        values = read_object(self.path / "status.json")
        if values and values["state"] == "running" and not is_recorded_process(values["process"]):
            result = self.result()
            # without a result the process was killed
            return {**values, "state": "failed" if result is None or "problems" in result else "done"}
        return values

    def output(self) -> str:
        with contextlib.suppress(FileNotFoundError), (self.path / "output.txt").open("rb") as file:
            return file.read(2**26).decode("utf-8", "replace")  # at most 64 MiB
        return ""

    def result(self) -> dict[str, Any] | None:
        # a command prints its JSON result last, after its progress
        for line in reversed(self.output().split("\n")):
            with contextlib.suppress(ValueError):
                if line.startswith("{"):
                    return dict(parse_json(line))
        return None


def task_of(workspace: Workspace, run: RunDirectory, verb: str) -> Task:
    """Return the task of a command on a run."""
    return Task(workspace.root, workspace.folder("tasks") / run.path.name / verb)


class Start(Task):
    """The start of a run, after earlier starts and running runs."""

    def view(self) -> dict[str, Any]:
        """Return state and newest line of output, or the result."""
        status, lines = self.status() or {}, self.output().strip().splitlines()
        result = self.result()
        if result is None and status.get("state") == "running":
            state = "waiting" if (self.path / _WAITING).exists() else "preparing"
            return {"state": state, "message": lines[-1][:500] if lines else ""}
        if result is None:
            result = {"problems": [*lines[-1:], "the process ended without a result"], "fix": "Start the run again."}
        if "problems" in result:
            return {"state": "failed", "problems": result["problems"], "fix": result["fix"]}
        return {"state": "started", "run": Path(result["run"]).name}

    def cancel(self) -> bool:
        try:
            (self.path / _WAITING).unlink()
        except FileNotFoundError:
            return False
        shutil.rmtree(self.path, ignore_errors=True)
        return True

    def reason_to_wait(self, workspace: Workspace) -> str:
        # starts before runs: a start ends when its run is alive
        if any(start.path.name < self.path.name and start.view()["state"] in OPEN_STATES for start in starts(workspace)):
            return "starts after an earlier one"
        running = next((run.path.name for run in workspace.list_runs() if is_alive(run)), None)
        return f"starts when {running} has ended" if running else ""


def starts(workspace: Workspace) -> list[Start]:
    """Return the requested starts, oldest first."""
    return [Start(workspace.root, path) for path in sorted(workspace.folder("starts").iterdir()) if path.is_dir()]


def start_run(workspace: Workspace, recipe: Recipe, *, force: bool = False) -> Start:
    """Request a new run."""
    start = _new_start(workspace)
    file = start.path / "recipe.yaml"
    file.write_text(write_recipe(recipe), encoding="utf-8")
    options = ["--detach", "--json", *(["--force"] if force else [])]
    start.begin(str(workspace.runs), str(start.path), "run", str(file), *options, module=__name__)
    return start


def resume_run(workspace: Workspace, run: RunDirectory) -> None:
    """Request the continuation of a run, once."""
    for start in starts(workspace):
        if start.path.name.partition("-")[2] == run.path.name and start.view()["state"] in OPEN_STATES:  # a second click
            return
    start = _new_start(workspace, f"-{run.path.name}")
    start.begin(str(workspace.runs), str(start.path), "resume", str(run.path), module=__name__)


def _new_start(workspace: Workspace, suffix: str = "") -> Start:
    ended = [start for start in starts(workspace) if start.view()["state"] not in OPEN_STATES]
    for start in ended[:-_MOST_ENDED_STARTS]:
        shutil.rmtree(start.path, ignore_errors=True)
    path = workspace.folder("starts") / f"{time.time_ns():020d}{suffix}"
    path.mkdir(mode=0o700)
    (path / _WAITING).touch()
    return Start(workspace.root, path)


def main() -> int:
    """Start or resume a run when it is its turn; return the exit status."""
    keep_private()
    runs, folder, verb, *arguments = sys.argv[1:]
    workspace, start, printed = Workspace(Path.cwd(), Path(runs)), Start(Path.cwd(), Path(folder)), ""
    while (start.path / _WAITING).exists() and (reason := start.reason_to_wait(workspace)):
        if reason != printed:
            print(reason, flush=True)  # noqa: T201 - the page shows it
        printed = reason
        time.sleep(_POLL_S)
    try:
        (start.path / _WAITING).unlink()
    except FileNotFoundError:  # canceled
        return 0
    print("loading libraries", flush=True)  # noqa: T201
    if verb == "run":
        return exec_command([sys.executable, "-P", "-m", "finetune", verb, *arguments])
    from finetune.run import control  # here: imports stay at most ten deep

    try:
        control.resume(RunDirectory(Path(arguments[0])))
    except FinetuneError as error:
        print(json.dumps(error.as_json()))  # noqa: T201
        return error.exit_code
    print(json.dumps({"run": arguments[0]}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
