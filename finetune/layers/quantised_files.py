"""Folders of quantised models in the cache: names, leftovers of killed processes, size and deletion. Imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from finetune.files import cache_dir
from finetune.system import is_locked

SUFFIX = ".quantised"


def folder() -> Path:
    """Return the folder that holds those of models."""
    return cache_dir() / "quantised"


def lock_of(path: Path) -> Path:
    """Return the lock of one model, held while it is verified or written."""
    return path.with_suffix(".lock")


def unfinished(path: Path, process: int | str) -> Path:
    """Return the name that a process gives a model's folder until it is complete; `*` for the names of all processes."""
    return path.with_name(f".{path.name}.{process}")


def complete_models() -> list[Path]:
    """Return the folders that are complete."""
    return sorted(path for path in folder().glob(f"*{SUFFIX}") if not path.name.startswith("."))


def size_bytes() -> int:
    """Return the bytes of all models, also of unfinished ones."""
    return sum(path.stat().st_size for path in folder().rglob("*") if path.is_file())


def clear() -> None:
    """Delete all models but those that a process is writing now; open files stay readable there. Raises OSError."""
    for path in list(folder().glob("*")):
        name = path.name.removeprefix(".").partition(SUFFIX)[0] if SUFFIX in path.name else path.stem
        if not is_locked(lock_of(path.with_name(name + SUFFIX))):
            delete(path)


def delete(path: Path) -> None:
    """Delete a folder, or any file that has its name. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
