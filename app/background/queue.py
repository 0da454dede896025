"""Queue of requested runs; one process starts the runs in order."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.files import read_object, write_json
from finetune.recipe import write_recipe
from finetune.settings import Recipe
from finetune.system import is_locked, rename

from ..worker import detach
from ..workspace import Workspace

#: Open states; status.json is {"state": waiting | preparing | started | failed, "message": ..., "run": ...}.
OPEN = ("waiting", "preparing")
#: Number of started and failed entries to keep.
_MOST_CLOSED = 8


@dataclass(frozen=True)
class Entry:
    """One requested start."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    def status(self) -> dict[str, Any]:
        # a damaged entry must not block the queue
        unreadable = {"state": "failed", "message": "its status file can't be read", "problems": [], "fix": ""}
        return read_object(self.path / "status.json") or unreadable

    def set_status(self, state: str, message: str = "", **values: Any) -> None:
        write_json(self.path / "status.json", {"state": state, "message": message, **values})


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
        entry.set_status("waiting", "in the queue", resume=resume, force=force, asked_s=time.time())
        entry = Entry(rename(building, self.folder / building.name[1:]))
        self.remove_old()
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
            detach(self.workspace.root, ".background.starter", str(self.workspace.runs), log=self.folder / ".starter.txt")

    def remove_old(self) -> None:
        closed = [entry for entry in self.entries() if entry.status()["state"] not in OPEN]
        for entry in closed[:-_MOST_CLOSED]:
            shutil.rmtree(entry.path, ignore_errors=True)
