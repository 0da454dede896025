"""Manifests: the hash of each file in a folder."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import read_object, sha256_of, write_text
from finetune.system import sync_file, sync_folder

MANIFEST = "MANIFEST.json"
#: Suffixes of files that libraries load: an added file is a change only with one of them.
_LOADED_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".json", ".py"}
_THREADS = 4


def write_manifest(folder: Path, values: dict[str, Any]) -> None:
    """Sync a folder's files, and last write their manifest with `values`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    with ThreadPoolExecutor(1) as pool:  # hash while the disk syncs
        syncs = [pool.submit(sync_file, path) for path in paths]
        files = {
            path.relative_to(folder).as_posix(): {"sha256": sha256_of(path), "bytes": path.stat().st_size} for path in paths
        }
        for sync in syncs:
            sync.result()  # raises the error of the thread
    manifest = {**values, "files": files}
    write_text(folder / MANIFEST, json.dumps({**manifest, "seal": _seal_of(manifest)}, indent=1), durable=True)
    sync_folder(folder)


def changes_in(folder: Path, *, required: bool = True, only: str = "") -> list[str]:
    """Return a line for each changed, missing or added file, or for the file `only`; `required`: and for a missing manifest."""
    if not os.path.exists(folder / MANIFEST):  # noqa: PTH110
        return [f"its {MANIFEST} is missing"] if required else []
    manifest = read_object(folder / MANIFEST)
    if manifest is None or "seal" not in manifest:
        return ["its manifest can't be read"]
    if manifest.pop("seal") != _seal_of(manifest):
        return ["its manifest has changed since it was sealed"]
    files = {name: expected for name, expected in manifest["files"].items() if only in ("", name)}
    with ThreadPoolExecutor(_THREADS) as pool:
        changes = pool.map(lambda name: _change(folder / name, name, files[name]), files)
        problems = [change for change in changes if change]
    if only:  # skip the slow search for added files
        return problems
    present = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.suffix in _LOADED_SUFFIXES)
    return problems + [f"{name} is not in its manifest" for name in present if name not in files and name != MANIFEST]


def require_unchanged(folder: Path, kind: type[FinetuneError], fix: str, *, required: bool = True) -> None:
    """Raise `kind` if a folder differs from its manifest."""
    if changes := changes_in(folder, required=required):
        raise kind([f"{folder}: {change}" for change in changes[:5]], fix)


def _change(path: Path, name: str, expected: dict[str, Any]) -> str:
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != expected["bytes"]:
        return f"{name} has {path.stat().st_size:,} bytes, not the {expected['bytes']:,} in the manifest"
    return f"{name} has changed since it was sealed" if sha256_of(path) != expected["sha256"] else ""


def _seal_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
