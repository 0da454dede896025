"""Folders of quantised models in the cache."""

from __future__ import annotations

# no torch here: the command line lists and clears models without it
import shutil
from pathlib import Path

from finetune.files import cache_dir
from finetune.system import is_locked

SUFFIX = ".quantised"


def folder() -> Path:
    """Return the folder of all models."""
    return cache_dir() / "quantised"


def lock_of(path: Path) -> Path:
    """Return the path of a model's lock, held while the model is verified or written."""
    return path.with_name(f"{path.name}.lock")


def complete_models() -> list[Path]:
    """Return the folders of complete models."""
    return sorted(folder().glob(f"*{SUFFIX}"))


def size_bytes() -> int:
    """Return the bytes of all models, complete or not."""
    return sum(path.stat().st_size for path in folder().rglob("*") if path.is_file())


def clear() -> None:
    """Delete all models that no process is writing. Raises OSError."""
    for path in list(folder().glob("*")):
        model = path.with_name(path.name.partition(SUFFIX)[0] + SUFFIX)
        if not is_locked(lock_of(model)):
            # a process that has the files open can still read them
            delete(path)


def delete(path: Path) -> None:
    """Delete a folder or file. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
