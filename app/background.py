"""Detached processes that outlive the page: commands on results, and the queue of requested runs.

The queue is worked off by `python -m app.background RUNS [ENTRY]`.
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

from .worker import child_environment, detach, module_command
from .workspace import Workspace

#: States before the start. status.json is {"state": waiting | preparing | started | failed, "message": ..., "run": ...}.
OPEN_STATES = ("waiting", "preparing")
_MOST_CLOSED_ENTRIES = 8  # started and failed entries that are kept
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

    def open_entries(self) -> list[Entry]:
        return [entry for entry in self.entries() if entry.status()["state"] in OPEN_STATES]

    def add(self, recipe: Recipe, *, resume: str | None = None, force: bool = False) -> Entry:
        """Queue a new run, or a continuation of the run `resume`."""
        for entry in self.open_entries():
            if resume and entry.status().get("resume") == resume:  # a second click
                return entry
        # hidden until complete: the starter must not see half an entry
        hidden = self.folder / f".{time.time_ns():020d}-{os.getpid()}"
        hidden.mkdir(mode=0o700)
        entry = Entry(hidden)
        entry.recipe.write_text(write_recipe(recipe), encoding="utf-8")
        entry.set_status("waiting", "in the queue", resume=resume, force=force)
        entry = Entry(rename(hidden, self.folder / hidden.name[1:]))
        closed = [entry for entry in self.entries() if entry.status()["state"] not in OPEN_STATES]
        for old_entry in closed[:-_MOST_CLOSED_ENTRIES]:
            shutil.rmtree(old_entry.path, ignore_errors=True)
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
        if self.open_entries() and not is_locked(self.folder / ".lock"):
            starter = module_command(".background", str(self.workspace.runs))
            detach(self.workspace.root, starter, self.folder / ".starter.txt")

    def start_all(self) -> None:
        """Start runs until the queue is empty."""
        lock = take_lock(self.folder / ".lock", wait_s=1)  # a process that tests the lock holds it for a moment
        if lock is None:
            return
        with lock:
            while entry := next(iter(self.open_entries()), None):
                busy = next((run.path.name for run in self.workspace.list_runs() if is_alive(run)), None)
                if busy is None:
                    self._start_in_child(entry)
                    continue
                message = f"starts when {busy} has ended"
                # the user may have removed the entry meanwhile
                if entry.path.exists() and entry.status()["message"] != message:
                    entry.set_status("waiting", message)
                time.sleep(_POLL_S)

    def _start_in_child(self, entry: Entry) -> None:
        # a child process, whose libraries take no memory while the run trains
        entry.set_status("preparing", "loading libraries")
        log = entry.path / "log.txt"
        command = module_command(".background", str(self.workspace.runs), str(entry.path))
        with log.open("ab") as file:
            child = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=child_environment())
        if entry.status()["state"] == "preparing":  # the child died before it could write an error
            last_line = (log.read_text(encoding="utf-8", errors="replace").strip() or "no output").splitlines()[-1][:500]
            entry.set_status("failed", f"the preparation ended with status {child.returncode}", problems=[last_line], fix="")

    def start(self, entry: Entry) -> None:
        """Prepare and start the run of an entry."""
        from finetune.run import control  # here: imports stay at most ten deep

        status = entry.status()
        try:
            if resumed_name := status.get("resume"):
                # a deleted run: `resume` raises the error for the page
                run = self.workspace.run(resumed_name) or RunDirectory(self.workspace.runs / resumed_name)
                control.resume(run)
            else:
                run = self._create_run(entry, bool(status.get("force")))
                control.start(run)
        except FinetuneError as error:
            # the page shows the error from the status
            entry.set_status("failed", error.title, problems=error.problems, fix=error.fix)
        else:
            entry.set_status("started", "", run=run.path.name)

    def _create_run(self, entry: Entry, force: bool) -> RunDirectory:
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
    """A detached finetune command, such as `eval RUN`."""

    #: Working folder of the command.
    root: Path
    #: Folder of status.json and output.txt.
    path: Path

    def begin(self, *arguments: str) -> None:
        """Start the command. Raises CommandError if it is running."""
        if (self.status() or {}).get("state") == "running":
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


def main() -> None:
    """Start all entries, or the entry in the second argument."""
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
