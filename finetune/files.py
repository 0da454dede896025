"""Files as the whole project writes and finds them: the cache folder, files written whole or not at all, free disk space."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any


def cache_dir() -> Path:
    """Where measurements, forecasts and the queue of a card are kept: $FINETUNE_CACHE, else $XDG_CACHE_HOME/finetune, else
    ~/.cache/finetune."""
    chosen = os.environ.get("FINETUNE_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "finetune"


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file so that a reader sees the old content or the new, never half; `durable`: also after a power cut.

    Raises OSError when there is no room or no permission; then nothing has changed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, values: Any) -> None:
    """The same for JSON, durably: what runs are made of."""
    write_text(path, json.dumps(values, indent=1, ensure_ascii=False), durable=True)


def existing_parent(path: Path) -> Path:
    """The path, or the nearest folder above it that exists: where its bytes would go."""
    return next(parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists())


def free_disk_bytes(path: Path) -> int:
    """Bytes free where `path` is or would be made."""
    return shutil.disk_usage(existing_parent(path)).free
