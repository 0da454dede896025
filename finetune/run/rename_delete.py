"""Rename, delete and restore runs."""

from __future__ import annotations

import re
import time
from pathlib import Path

from finetune.errors import CommandError
from finetune.run.directory import RunDirectory, remember
from finetune.run.state import is_alive
from finetune.system import rename

_NAME = re.compile(r"[^\W_]([\w .+-]{0,98}[\w+-])?")  # Windows folders can't end in a dot

#: Folder of deleted runs, and the suffix of their names: time and a number.
_TRASH, _STAMP = ".trash", re.compile(r"-\d{8}-\d{6}-\d{6}$")


def rename_run(run: RunDirectory, name: str) -> RunDirectory:
    """Rename a run in its folder. Raises CommandError."""
    name = name.strip()
    if not _NAME.fullmatch(name):
        raise CommandError(
            f"{name[:100]!r} is not a valid run name", "Begin with a letter or digit; also allowed: . _ + - and spaces."
        )
    target = run.path.with_name(name)
    if target.exists():
        raise CommandError(f"{name!r} exists already", "Choose another name.")
    _refuse_alive(run)
    renamed = RunDirectory(rename(run.path, target))
    remember(renamed)
    return renamed


def delete_run(run: RunDirectory) -> Path:
    """Move a run to .trash; return its new path. Raises CommandError."""
    _refuse_alive(run)
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06d}"
    target = run.path.parent / _TRASH / f"{run.path.name}-{stamp}"
    target.parent.mkdir(exist_ok=True, mode=0o700)
    return rename(run.path, target)


def deleted_runs(runs: Path) -> list[tuple[str, Path]]:
    """Return the deleted runs, last deleted first."""
    folders = [
        path for path in (runs / _TRASH).glob("*") if path.is_dir() and not path.is_symlink() and _STAMP.search(path.name)
    ]
    folders.sort(key=lambda path: path.name[-22:], reverse=True)
    return [(_STAMP.sub("", path.name), path) for path in folders]


def restore_run(runs: Path, folder_name: str) -> RunDirectory:
    """Move a deleted run back under its name. Raises CommandError."""
    name = next((name for name, path in deleted_runs(runs) if path.name == folder_name), None)
    if name is None:
        raise CommandError(f"{folder_name[:100]!r} is not in the trash", f"See {runs / _TRASH}")
    if (runs / name).exists():
        raise CommandError(f"{name!r} exists already", "Rename that run first.")
    run = RunDirectory(rename(runs / _TRASH / folder_name, runs / name))
    remember(run)
    return run


def _refuse_alive(run: RunDirectory) -> None:
    if is_alive(run):
        raise CommandError(f"{run.path.name} is running", f"Pause it first: finetune pause {run.path}")
