"""Work that outlives the page, as detached processes: commands on results, and a queue of requested runs.

The queue's entries are started in order by `python -m app.background RUNS [ENTRY]`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.card.visible import hide_gpus
from finetune.errors import CommandError, FinetuneError
from finetune.files import parse_json, read_object, write_json
from finetune.gc_settings import raise_gc_thresholds
from finetune.privacy import keep_private
from finetune.recipe import load_recipe, write_recipe
from finetune.run.directory import RunDirectory
from finetune.run.state import is_alive, is_recorded_process, process_record
from finetune.settings import AUTO, Recipe
from finetune.system import is_locked, rename, shell_join, take_lock

from .worker import command, detach, environment
from .workspace import Workspace

#: Open states; status.json is {"state": waiting | preparing | started | failed, "message": ..., "run": ...}.
OPEN = ("waiting", "preparing")
#: Number of started and failed entries to keep.
_MOST_CLOSED = 8
_POLL_S = 0.3


@dataclass(frozen=True)
class Entry:
    """One requested start."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    def status(self) -> dict[str, Any]:
        # a damaged entry must not block the queue
        unreadable = {"state": "failed", "message": "its status file can't be read"}
        return {"problems": [], "fix": "", "run": "", **(read_object(self.path / "status.json") or unreadable)}

    def set_status(self, state: str, message: str = "", **values: Any) -> None:
        earlier = read_object(self.path / "status.json") or {}
        write_json(self.path / "status.json", {**earlier, "state": state, "message": message, **values})


class Queue:
    """Queue entries, oldest first."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.folder = workspace, workspace.folder("queue")

    def entries(self) -> list[Entry]:
        return [Entry(path) for path in sorted(self.folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]

    def waiting(self) -> list[Entry]:
        return [entry for entry in self.entries() if entry.status()["state"] in OPEN]

    def add(self, recipe: Recipe, *, resume: str | None = None, force: bool = False) -> Entry:
        """Queue a new run, or a continuation of the run `resume`."""
        for entry in self.waiting():
            if resume and entry.status().get("resume") == resume:  # a second click
                return entry
        # hidden until complete: the starter must not see half an entry
        building = self.folder / f".{time.time_ns():020d}-{os.getpid()}"
        building.mkdir(mode=0o700)
        entry = Entry(building)
        entry.recipe.write_text(write_recipe(recipe), encoding="utf-8")
        entry.set_status("waiting", "in the queue", resume=resume, force=force)
        entry = Entry(rename(building, self.folder / building.name[1:]))
        closed = [entry for entry in self.entries() if entry.status()["state"] not in OPEN]
        for old in closed[:-_MOST_CLOSED]:
            shutil.rmtree(old.path, ignore_errors=True)
        self.ensure_starter()
        return entry

    def cancel(self, name: str) -> bool:
        for entry in self.entries():
            # an entry that has begun can't be removed
            if entry.path.name == name and entry.status()["state"] == "waiting":
                shutil.rmtree(entry.path, ignore_errors=True)
                return True
        return False

    def ensure_starter(self) -> None:
        # detached: the queue goes on when the app ends; a second starter exits by itself
        if self.waiting() and not is_locked(self.folder / ".lock"):
            starter = command(".background", str(self.workspace.runs))
            detach(self.workspace.root, starter, self.folder / ".starter.txt")

    def start_all(self) -> None:
        """Start runs until the queue is empty."""
        lock = take_lock(self.folder / ".lock", wait_s=1)  # a process that tests the lock holds it for a moment
        if lock is None:
            return
        with lock:
            while waiting := self.waiting():
                busy = next((run.path.name for run in self.workspace.list_runs() if is_alive(run)), None)
                if busy is None:
                    self._start_in_child(waiting[0])
                    continue
                message = f"starts when {busy} has ended"
                if waiting[0].path.exists() and waiting[0].status()["message"] != message:
                    waiting[0].set_status("waiting", message)
                time.sleep(_POLL_S)

    def _start_in_child(self, entry: Entry) -> None:
        # the libraries' memory is free again while the run trains
        entry.set_status("preparing", "loading libraries")
        log = entry.path / "log.txt"
        child = command(".background", str(self.workspace.runs), str(entry.path))
        with log.open("ab") as file:
            code = subprocess.run(child, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=environment()).returncode
        if entry.status()["state"] == "preparing":  # the child died before it could write an error
            lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
            entry.set_status("failed", f"the preparation ended with status {code}", problems=[lines[-1][:500]], fix="")

    def start(self, entry: Entry) -> None:
        """Prepare and start one entry."""
        from finetune.run import control  # here: imports stay at most ten deep

        status = entry.status()
        try:
            if resumed := status.get("resume"):
                run = self.workspace.run(resumed) or RunDirectory(self.workspace.runs / resumed)
                control.resume(run)
            else:
                run = self._prepared(entry, bool(status.get("force")))
                control.start(run)
        except FinetuneError as error:
            # the page shows the error from the status
            entry.set_status("failed", error.title, problems=error.problems, fix=error.fix)
        else:
            entry.set_status("started", "", run=run.path.name)

    def _prepared(self, entry: Entry, force: bool) -> RunDirectory:
        from finetune.run.prepare import create_run, prepare

        recipe = load_recipe(entry.recipe)
        prepared = prepare(recipe, force=force, progress=lambda text: entry.set_status("preparing", text))
        if recipe.output_dir == AUTO:  # the plan chooses the name, the app the folder
            name = Path(str(prepared.plan.settings.output_dir)).name
            settings = prepared.plan.settings.model_copy(update={"output_dir": str(self.workspace.runs / name)})
            prepared = dataclasses.replace(prepared, plan=dataclasses.replace(prepared.plan, settings=settings))
        entry.set_status("preparing", "writing the run directory")
        return create_run(prepared)


@dataclass(frozen=True)
class Task:
    """One command of finetune with its output."""

    #: Working folder of the command.
    root: Path
    path: Path

    def begin(self, *arguments: str) -> None:
        """Start the command. Raises CommandError."""
        if self.is_running:
            raise CommandError(f"finetune {arguments[0]} is already running")
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        output = self.path / "output.txt"
        output.write_bytes(b"")
        process = detach(self.root, [sys.executable, "-P", "-m", "finetune", *arguments], output)
        status = {"state": "running", "command": f"finetune {shell_join([*arguments])}", "began_s": time.time()}
        write_json(self.path / "status.json", {**status, "process": process_record(process)})

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


def task_of(workspace: Workspace, run: RunDirectory, verb: str) -> Task:
    """Return the task of a command on a run."""
    return Task(workspace.root, workspace.folder("tasks") / run.path.name / verb)


def main() -> None:
    """Start all entries; in a child process one."""
    keep_private()
    raise_gc_thresholds()
    queue = Queue(Workspace(Path.cwd(), Path(sys.argv[1])))
    if len(sys.argv) > 2:
        hide_gpus()
        queue.start(Entry(Path(sys.argv[2])))
    else:
        queue.start_all()


if __name__ == "__main__":
    main()
