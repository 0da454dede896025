"""The folder of quantised models in the cache: names, leftovers of killed processes, size and deletion. Imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

from finetune.files import cache_dir
from finetune.system import is_locked

_SUFFIX = ".safetensors"


def folder() -> Path:
    """The folder of the files."""
    return cache_dir() / "quantised"


def lock_of(path: Path) -> Path:
    """The lock of one file, held while it is verified or written."""
    return path.with_suffix(".lock")


def unfinished(path: Path, process: int | str) -> Path:
    """The name that a process gives the file until it is complete; `*` for those of all."""
    return path.with_name(f".{path.name}.{process}")


def remove_unfinished(path: Path) -> None:
    """Delete what writers of this file left when they were killed; call it while holding its lock."""
    for leftover in path.parent.glob(unfinished(path, "*").name):
        delete(leftover)


def complete_files() -> list[Path]:
    """The files that are complete."""
    return sorted(path for path in folder().glob(f"*{_SUFFIX}") if not path.name.startswith("."))


def size_bytes() -> int:
    """Bytes of all files in the folder, also of unfinished ones."""
    return sum(path.stat().st_size for path in folder().glob("*") if path.is_file())


def clear() -> None:
    """Delete all files but those that a process is writing now; one that is open stays readable there. Raises OSError."""
    for path in list(folder().glob("*")):
        name = path.name.removeprefix(".").partition(_SUFFIX)[0] if _SUFFIX in path.name else path.stem
        if not is_locked(lock_of(path.with_name(name + _SUFFIX))):
            delete(path)


def delete(path: Path) -> None:
    """Delete what has the name of a file, whatever it is. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
