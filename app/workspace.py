"""The app's folders: the one it was started in, the runs, and a hidden one for the app's own files."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from finetune.errors import RecipeError
from finetune.run.directory import RunDirectory, list_runs
from finetune.run.state import is_alive
from finetune.system import rename

_NAME = re.compile(r"[^\W_]([\w .+-]{0,98}[\w+-])?")  # a folder of Windows can't end in a dot


@dataclass(frozen=True)
class Workspace:
    """`root`: where relative paths of recipes start. `runs`: the folder of run directories. Both absolute."""

    root: Path
    runs: Path

    @property
    def state(self) -> Path:
        """The app's own files: draft recipe, queue, uploads, conversations."""
        return self.runs / ".app"

    def folder(self, name: str) -> Path:
        """A folder of the app's own, made when missing, readable by its owner only."""
        path = self.state / name
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return path

    def list_runs(self) -> list[RunDirectory]:
        """Runs, newest first; symbolic links are left out."""
        return [run for run in list_runs(self.runs) if not run.path.is_symlink()]

    def run(self, name: str | None) -> RunDirectory | None:
        """The run called `name`; None when there is none. A name can't lead out of the folder."""
        if not name or name != Path(name).name or name.startswith("."):
            return None
        run = RunDirectory(self.runs / name)
        return run if run.plan.is_file() and not run.path.is_symlink() else None

    def newest(self) -> RunDirectory | None:
        """The run that a page shows when none is named: a live one, else the newest."""
        found = self.list_runs()
        return next((run for run in found if is_alive(run)), found[0] if found else None)

    def rename(self, run: RunDirectory, name: str) -> RunDirectory:
        """Give a run another name. Raises RecipeError when the name is invalid or taken, or the run is alive."""
        name = name.strip()
        if not _NAME.fullmatch(name):
            raise RecipeError(
                f"{name[:100]!r} is not a valid run name", "Begin with a letter or digit; also allowed: . _ + - and spaces."
            )
        if (self.runs / name).exists():
            raise RecipeError(f"{name!r} exists already", "Choose another name.")
        if is_alive(run):
            raise RecipeError(f"{run.path.name} is running", "Stop it first.")
        return RunDirectory(rename(run.path, self.runs / name))

    def discard(self, run: RunDirectory) -> Path:
        """Delete a run by moving it to .trash; returns its path there. Raises RecipeError when it is alive."""
        if is_alive(run):
            raise RecipeError(f"{run.path.name} is running", "Stop it first.")
        target = self.runs / ".trash" / f"{run.path.name}-{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06d}"
        target.parent.mkdir(exist_ok=True, mode=0o700)
        return rename(run.path, target)
