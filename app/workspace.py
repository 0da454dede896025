"""Where the app finds things: the folder it was started in, the runs, and a hidden folder of its own for what is no run."""

from __future__ import annotations

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import RecipeError
from finetune.run.directory import RunDirectory, list_runs
from finetune.run.state import is_alive

_NAME = re.compile(r"[^\W_][\w .+-]{0,99}")


@dataclass(frozen=True)
class Workspace:
    """`root`: where relative paths of recipes start. `runs`: the folder of run directories. Both absolute."""

    root: Path
    runs: Path

    @property
    def state(self) -> Path:
        """What the app keeps that is no run: draft recipe, queue, uploads, conversations."""
        return self.runs / ".app"

    def folder(self, name: str) -> Path:
        """A folder of the app's own, made when missing, readable by its owner only."""
        path = self.state / name
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return path

    def list_runs(self) -> list[RunDirectory]:
        """Runs, newest first; links that lead elsewhere are no runs of this workspace."""
        return [run for run in list_runs(self.runs) if not run.path.is_symlink()]

    def run(self, name: str | None) -> RunDirectory | None:
        """The run called `name`; None when there is none. A name never leads out of the folder."""
        if not name or name != Path(name).name or name.startswith("."):
            return None
        run = RunDirectory(self.runs / name)
        return run if run.plan.is_file() and not run.path.is_symlink() else None

    def newest(self) -> RunDirectory | None:
        """The run that a page shows when none is named: one at work, else the newest."""
        found = self.list_runs()
        return next((run for run in found if is_alive(run)), found[0] if found else None)

    def rename(self, run: RunDirectory, name: str) -> RunDirectory:
        """Give a run another name. Raises RecipeError when the name is no plain name, is taken, or the run is at work."""
        name = name.strip()
        if not _NAME.fullmatch(name):
            raise RecipeError(f"{name[:100]!r} is no name for a run", "Use letters, digits, spaces, and . _ + - inside.")
        if (self.runs / name).exists():
            raise RecipeError(f"there is something called {name!r} already", "Choose another name.")
        if is_alive(run):
            raise RecipeError(f"{run.path.name} is at work", "Stop it first; its processes know it by this name.")
        return RunDirectory(run.path.rename(self.runs / name))

    def discard(self, run: RunDirectory) -> Path:
        """Move a run away, not destroy it. Returns where it went. Raises RecipeError when it is at work."""
        if is_alive(run):
            raise RecipeError(f"{run.path.name} is at work", "Stop it first.")
        target = self.runs / ".trash" / f"{run.path.name}-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06d}"
        target.parent.mkdir(exist_ok=True, mode=0o700)
        return Path(shutil.move(run.path, target))
