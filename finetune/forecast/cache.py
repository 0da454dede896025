"""Dry runs made before, on disk, readable without torch: keyed by configuration, settings, library versions and this code."""

from __future__ import annotations

import contextlib
import hashlib
import json
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from finetune.files import cache_dir, write_text

#: Libraries whose code decides where the bytes are.
LIBRARIES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate")
_OWN_CODE = ("compat", "forecast", "model")


@cache
def library_versions() -> dict[str, str]:
    """Name -> version of each library that the forecast depends on; those that are not installed are left out."""
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def key_of(**inputs: Any) -> str:
    """A digest of the inputs, the libraries' versions and the forecast's own code."""
    text = json.dumps([inputs, library_versions(), _code_digest()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read(key: str) -> dict[str, Any] | None:
    """What was kept under this key; None when nothing was, or when it is damaged: it is made again."""
    try:
        values: Any = json.loads(_path(key).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def write(key: str, values: dict[str, Any]) -> None:
    """Keep `values`. A cache that can't be written costs time, not the forecast."""
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(values))


def _path(key: str) -> Path:
    return cache_dir() / "forecasts" / f"{key}.json"


@cache
def _code_digest() -> str:
    package = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for folder in _OWN_CODE:
        for file in sorted((package / folder).glob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
