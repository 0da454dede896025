"""A base model's safetensors files: complete before a run starts (only headers are read), and unchanged when it resumes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from finetune.errors import ModelError
from finetune.files import cache_dir, sha256_of, write_text
from finetune.model.configuration import resolve_model_path

if TYPE_CHECKING:
    from finetune.recipe import Settings

#: Files of a checkpoint in several parts, and of an adapter.
INDEX, ADAPTER_WEIGHTS = "model.safetensors.index.json", "adapter_model.safetensors"
_DOWNLOAD_AGAIN = "Download the weights again, or give another folder. (Files of git-lfs: git lfs pull)"


def check_weights(folder: Path) -> None:
    """Raise RecipeError naming every weight file that is missing, truncated or no safetensors file."""
    names = _files(folder)
    if not names:
        raise ModelError(f"{folder} has no weights (no *.safetensors)", "Save them with save_pretrained, or download them.")
    problems = [f"{folder / name}: {problem}" for name in names if (problem := _problem(folder / name))]
    if problems:
        raise ModelError(problems, _DOWNLOAD_AGAIN)


def weights_fingerprint(settings: Settings) -> str | None:
    """One hash of the base model's weight files; None when they are not on this disk.

    A file is hashed again only when its size or its time has changed.
    """
    from huggingface_hub import try_to_load_from_cache

    folder = Path(path := resolve_model_path(settings))
    if not folder.is_dir():
        cached_config = try_to_load_from_cache(path, "config.json", revision=settings.model_revision)
        if not isinstance(cached_config, str):
            return None
        folder = Path(cached_config).parent
    hashes = "".join(f"{name} {_hash(folder / name)}\n" for name in _files(folder))
    return hashlib.sha256(hashes.encode()).hexdigest()


def _hash(path: Path) -> str:
    """The file's SHA-256, from the hub's cache (which names large files by it), this project's cache, or the content."""
    path = path.resolve()
    if re.fullmatch("[0-9a-f]{64}", path.name):
        return path.name
    stat = path.stat()
    key = hashlib.sha256(f"{path}\n{stat.st_size}\n{stat.st_mtime_ns}\n{stat.st_ino}".encode()).hexdigest()
    cache_file = cache_dir() / "weights" / key
    with contextlib.suppress(OSError):
        return cache_file.read_text(encoding="utf-8")
    digest = sha256_of(path)
    with contextlib.suppress(OSError):  # without a cache it is hashed again
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        write_text(cache_file, digest)
    return digest


def _files(folder: Path) -> list[str]:
    index = folder / INDEX
    if not index.is_file():
        return sorted(path.name for path in folder.glob("*.safetensors"))
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{index} can't be read: {type(error).__name__}: {error}", _DOWNLOAD_AGAIN) from None


def _problem(path: Path) -> str:
    """What is wrong with a file; empty when it is as long as its header says."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            beginning = file.read(8)
            length = int.from_bytes(beginning, "little")
            if beginning == b"version ":
                return "is a pointer of git-lfs, not the file"
            if len(beginning) < 8 or length > size - 8:
                return f"is truncated or no safetensors file ({size:,} bytes)"
            header = json.loads(file.read(length))
        data = max((part["data_offsets"][1] for name, part in header.items() if name != "__metadata__"), default=0)
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        return f"can't be read as safetensors: {error}"
    return f"is truncated: {size:,} of {8 + length + data:,} bytes" if size < 8 + length + data else ""
