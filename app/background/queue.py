"""The queue: one folder for each requested run; one process starts them in order when no other run is alive.

A folder has recipe.yaml and status.json: `{"state": waiting | preparing | started | failed, "message": ..., "run": ...}`. The
page may be closed and the app may end: the starter (app.background.starter) is a separate, detached process.
"""

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

from ..process import detach
from ..workspace import Workspace

OPEN = ("waiting", "preparing")
#: Started and failed entries that are kept.
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
        """Output of the preparation."""
        return self.path / "log.txt"

    def status(self) -> dict[str, Any]:
        """The entry's status; `failed` when its file can't be read."""
        unreadable = {"state": "failed", "message": "its status file can't be read", "problems": [], "fix": ""}
        return read_object(self.path / "status.json") or unreadable

    def set_status(self, state: str, message: str = "", **values: Any) -> None:
        """Write the status atomically."""
        write_json(self.path / "status.json", {"state": state, "message": message, **values})


class Queue:
    """The entries, oldest first."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.folder = workspace, workspace.folder("queue")

    def entries(self) -> list[Entry]:
        """All entries, oldest first."""
        return [Entry(path) for path in sorted(self.folder.iterdir()) if path.is_dir() and not path.name.startswith(".")]

    def waiting(self) -> list[Entry]:
        """Entries that are waiting or preparing."""
        return [entry for entry in self.entries() if entry.status()["state"] in OPEN]

    def add(self, recipe: Recipe, *, resume: str | None = None, force: bool = False) -> Entry:
        """Queue a new run, or with `resume` that run's continuation, without waiting."""
        for entry in self.waiting():
            if resume and entry.status().get("resume") == resume:  # the button was pressed twice
                return entry
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
        """Remove a waiting entry; False when it has begun or does not exist."""
        for entry in self.entries():
            if entry.path.name == name and entry.status()["state"] == "waiting":
                shutil.rmtree(entry.path, ignore_errors=True)
                return True
        return False

    def ensure_starter(self) -> None:
        """Start the starter when entries wait and no starter runs; a second starter would exit."""
        if self.waiting() and not is_locked(self.folder / ".lock"):
            detach(self.workspace.root, ".background.starter", str(self.workspace.runs), log=self.folder / ".starter.txt")

    def remove_old(self) -> None:
        """Remove all but the newest started and failed entries."""
        closed = [entry for entry in self.entries() if entry.status()["state"] not in OPEN]
        for entry in closed[:-_MOST_CLOSED]:
            shutil.rmtree(entry.path, ignore_errors=True)
