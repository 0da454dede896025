"""The app's folders: where it was started, the runs, and its files."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import FinetuneError
from finetune.run.directory import RunDirectory, list_runs

if TYPE_CHECKING:
    from finetune.sweep import Sweep

#: File in each sweep's folder: `finetune.sweep.JOURNAL`, without importing Optuna.
JOURNAL = "study.journal"


@dataclass(frozen=True)
class Workspace:
    """Absolute folders of the app."""

    #: Base of relative paths in recipes.
    root: Path
    #: Folder of run directories.
    runs: Path

    def folder(self, name: str) -> Path:
        """Return a private folder for the app's own files, made if missing."""
        path = self.runs / ".app" / name
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        return path

    def path_in_recipe(self, path: Path) -> str:
        """Return a path as in recipes: relative inside the start folder."""
        return (path.relative_to(self.root) if path.is_relative_to(self.root) else path).as_posix()

    def list_runs(self) -> list[RunDirectory]:
        return [run for run in list_runs(self.runs) if not run.path.is_symlink()]

    def list_sweeps(self) -> list[Sweep]:
        modified_s: dict[Path, float] = {}
        for path in self.runs.glob(f"*/{JOURNAL}"):
            with contextlib.suppress(OSError):  # deleted meanwhile
                modified_s[path] = path.stat().st_mtime
        paths = sorted(modified_s, key=modified_s.__getitem__, reverse=True)
        # damaged sweeps are left out
        return [sweep for path in paths if (sweep := self.sweep(path.parent.name)) is not None]

    def sweep(self, name: str | None) -> Sweep | None:
        path = self._folder_named(name)
        if path is None or not (path / JOURNAL).is_file():
            return None
        with contextlib.suppress(FinetuneError, ImportError):  # Optuna is an extra
            from finetune.sweep import open_sweep

            return open_sweep(path)
        return None

    def run(self, name: str | None) -> RunDirectory | None:
        path = self._folder_named(name)
        if path is None:
            return None
        # a run's own folder, else the arm of a sweep, which is a run, too
        folders = [path] if path.exists() else [sweep.path / path.name for sweep in self.list_sweeps()]
        runs = map(RunDirectory, folders)
        return next((run for run in runs if run.plan.is_file() and not run.path.is_symlink()), None)

    def _folder_named(self, name: str | None) -> Path | None:
        # a name must not lead out of the folder
        if not name or name != Path(name).name or name.startswith("."):
            return None
        path = self.runs / name
        with contextlib.suppress(OSError):  # a name that no file system allows
            return None if path.is_symlink() else path
        return None
