"""Rename and delete runs, for the command line and the page."""

from __future__ import annotations

import re
import time
from pathlib import Path

from finetune.errors import CommandError
from finetune.run.directory import RunDirectory, remember
from finetune.run.state import is_alive
from finetune.system import rename

_NAME = re.compile(r"[^\W_]([\w .+-]{0,98}[\w+-])?")  # a folder of Windows can't end in a dot


def rename_run(run: RunDirectory, name: str) -> RunDirectory:
    """Give a run another name in its folder. Raises RecipeError when the name is invalid or taken, or the run is alive."""
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
    """Delete a run by moving it to .trash in its folder; returns its path there. Raises RecipeError when it is alive."""
    _refuse_alive(run)
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06d}"
    target = run.path.parent / ".trash" / f"{run.path.name}-{stamp}"
    target.parent.mkdir(exist_ok=True, mode=0o700)
    return rename(run.path, target)


def _refuse_alive(run: RunDirectory) -> None:
    if is_alive(run):
        raise CommandError(f"{run.path.name} is running", f"Stop it first: finetune stop {run.path}")
