"""The folder of quantised models in the cache: names, what a killed process left, size and deletion. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from finetune.files import cache_dir
from finetune.system import is_locked

_SUFFIX = ".safetensors"


def folder() -> Path:
    """Where the files are."""
    return cache_dir() / "quantised"


def lock_of(path: Path) -> Path:
    """The lock of one file, held while it is checked or made."""
    return path.with_suffix(".lock")


def unfinished(path: Path, process: int | str) -> Path:
    """The name that a process gives the file until it is whole; `*` for those of all."""
    return path.with_name(f".{path.name}.{process}")


def remove_unfinished(path: Path) -> None:
    """Delete what writers of this file left when they were killed; call it while holding its lock."""
    for left in path.parent.glob(unfinished(path, "*").name):
        left.unlink(missing_ok=True)


def kept() -> list[Path]:
    """The whole files."""
    return sorted(path for path in folder().glob(f"*{_SUFFIX}") if not path.name.startswith("."))


def size_bytes() -> int:
    """Bytes of all that is in the folder, with what is being written."""
    return sum(path.stat().st_size for path in folder().glob("*") if path.is_file())


def clear() -> None:
    """Delete all files but those that a process is making now; one that is open stays readable there. Raises OSError."""
    for path in list(folder().glob("*")):
        name = path.name.removeprefix(".").partition(_SUFFIX)[0] if _SUFFIX in path.name else path.stem
        if not is_locked(lock_of(path.with_name(name + _SUFFIX))):
            path.unlink(missing_ok=True)
