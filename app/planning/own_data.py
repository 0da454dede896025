"""A person's own data as the draft's dataset: a file that was uploaded, a path, or a hub id."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path

from finetune.errors import RecipeError
from finetune.settings import AUTO

from ..workspace import Workspace
from .catalogue import DATA_ENDINGS
from .draft import Draft, Edited


def take_upload(workspace: Workspace, path: str | None) -> str:
    """Move an uploaded file to the app's uploads; returns its path as a recipe names it.

    Raises RecipeError when it is none that can be read.
    """
    if not path or Path(path).suffix.lower() not in DATA_ENDINGS:
        raise RecipeError("this file type is not supported", f"Use {', '.join(DATA_ENDINGS)}.")
    source = Path(path)
    stem = re.sub(r"[^A-Za-z0-9_-]+", "-", source.stem)[:60].strip("-") or "data"
    folder, suffix = workspace.folder("uploads"), source.suffix.lower()
    stems = itertools.chain([stem], (f"{stem}-{number}" for number in itertools.count(2)))
    target = next(free for name in stems if not (free := folder / f"{name}{suffix}").exists())
    shutil.move(source, target)
    return (target.relative_to(workspace.root) if target.is_relative_to(workspace.root) else target).as_posix()


def choose_data(draft: Draft, path: str | None) -> Edited:
    """Set the draft's dataset, without the previous dataset's options, and the method that its columns are for."""
    return draft.change(dataset={"path": (path or "").strip()}, method=AUTO)
