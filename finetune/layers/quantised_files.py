"""Folders of quantised models in the cache: names, size and deletion. Imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from finetune.files import cache_dir
from finetune.system import is_locked

SUFFIX = ".quantised"


def folder() -> Path:
    """Return the folder of all models."""
    return cache_dir() / "quantised"


def lock_of(path: Path) -> Path:
    """Return the lock of one model, held while it is verified or written."""
    return path.with_name(f"{path.name}.lock")


def complete_models() -> list[Path]:
    """Return the folders that are complete."""
    return sorted(folder().glob(f"*{SUFFIX}"))


def size_bytes() -> int:
    """Return the bytes of all models, also of unfinished ones."""
    return sum(path.stat().st_size for path in folder().rglob("*") if path.is_file())


def clear() -> None:
    """Delete all models except models being written now; open files stay readable. Raises OSError."""
    for path in list(folder().glob("*")):
        model = path.with_name(path.name.partition(SUFFIX)[0] + SUFFIX)
        if not is_locked(lock_of(model)):
            delete(path)


def delete(path: Path) -> None:
    """Delete a folder, or any file that has its name. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
