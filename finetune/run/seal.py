"""Manifests: the hash of every file of a folder, so that a change is found before the files are used.

A checkpoint is valid only with its manifest. The prepared data and the finished adapter have one, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.files import read_json, read_object, sha256_of
from finetune.system import WINDOWS, rename, sync_file, sync_folder

MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"checkpoint-(\d+)")
#: Files that a library would load if they were added to a folder; others (README.md) may be.
_LOADED = {".safetensors", ".bin", ".pt", ".pth", ".json", ".py"}
#: Facts that are hashes, and the message when they differ.
_HASHED = {"data": "the training data has changed", "base": "the base model's weights have changed",
           "base_config": "the base model's config.json or index has changed",
           "origin": "the adapter that it continued from has changed",
           "reference": "the precomputed reference has changed",
           "base_generation": "the base model's generation_config.json has changed"}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint, with the facts in its manifest."""

    path: Path
    step: int
    facts: dict[str, Any]


def seal(folder: Path, target: Path, step: int, facts: dict[str, Any]) -> Path:
    """Hash and sync every file of `folder`, write the manifest last, and rename the folder to `target`.

    `facts`: settings and data that a resumed run is compared with. Raises OSError when the disk is full; then `target` does not
    exist.
    """
    write_manifest(folder, {"step": step, "facts": facts})
    if target.exists():  # written by an attempt that died between sealing and its next step
        shutil.rmtree(target)
    rename(folder, target)
    sync_folder(target.parent)
    return target


def write_manifest(folder: Path, values: dict[str, Any]) -> None:
    """Hash and sync every file of `folder` and write its manifest, with `values`, last. Raises OSError."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    with ThreadPoolExecutor(1) as disk:  # hash while the disk syncs
        synced = [disk.submit(sync_file, path) for path in paths]
        files = {
            path.relative_to(folder).as_posix(): {"sha256": sha256_of(path), "bytes": path.stat().st_size} for path in paths
        }
        for future in synced:
            future.result()
    manifest = {**values, "files": files}
    manifest["seal"] = _seal_of(manifest)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def verify(folder: Path) -> list[str]:
    """What is wrong with a checkpoint, one line each; empty when every file is unchanged and none was added."""
    if not os.path.exists(folder / MANIFEST):  # noqa: PTH110 - no error for a folder that can't be entered
        return ["it is incomplete (no manifest): the run died while writing it"]
    problems = changes_in(folder)
    step = (read_object(folder / MANIFEST) or {}).get("step")
    if not problems and folder.name != f"checkpoint-{step}":
        return [f"its manifest is for step {step}"]
    return problems


def changes_in(folder: Path, *, required: bool = True, only: str = "") -> list[str]:
    """How a folder differs from its manifest, one line for each file; without a manifest empty unless one is `required`.

    `only`: the name of the one file to look at.
    """
    if not os.path.exists(folder / MANIFEST):  # noqa: PTH110
        return [f"its {MANIFEST} is missing"] if required else []
    manifest = read_object(folder / MANIFEST)
    if manifest is None or "seal" not in manifest:
        return ["its manifest can't be read"]
    if manifest.pop("seal") != _seal_of(manifest):
        return ["its manifest has changed since it was sealed"]
    files = {name: expected for name, expected in manifest["files"].items() if only in ("", name)}
    problems = [problem for name, expected in files.items() if (problem := _change(folder / name, name, expected))]
    if only:
        return problems
    loaded = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.suffix in _LOADED)
    return problems + [f"{name} is not in its manifest" for name in loaded if name not in files and name != MANIFEST]


def require_unchanged(folder: Path, kind: type[FinetuneError], fix: str, *, required: bool = True) -> None:
    """Raise an error of this kind when a folder differs from its manifest."""
    if changes := changes_in(folder, required=required):
        raise kind([f"{folder}: {change}" for change in changes[:5]], fix)


def _change(path: Path, name: str, expected: dict[str, Any]) -> str:
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != expected["bytes"]:
        return f"{name} has {path.stat().st_size:,} bytes, not the {expected['bytes']:,} in the manifest"
    return f"{name} has changed since it was sealed" if sha256_of(path) != expected["sha256"] else ""


def newest_verified(checkpoints: Path, before: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact checkpoint (before step `before`, if given), and a line for each newer one that was skipped."""
    skipped: list[str] = []
    for step, path in _by_step(checkpoints):
        if before is not None and step >= before:
            continue
        problems = verify(path)
        if not problems:
            return Checkpoint(path, step, read_json(path / MANIFEST, dict)["facts"]), skipped
        skipped.append(f"{path.name} skipped: {'; '.join(problems[:3])}")
    return None, skipped


def rotate(checkpoints: Path, keep: int, best: int | None = None) -> list[Path]:
    """Remove all but the newest `keep` checkpoints and that of step `best`, unless the newest is damaged; returns them."""
    sealed = [path for _, path in _by_step(checkpoints) if (path / MANIFEST).is_file()]
    if len(sealed) <= keep or verify(sealed[0]):
        return []
    removed = [path for path in sealed[keep:] if path.name != f"checkpoint-{best}"]
    for path in removed:
        shutil.rmtree(path, ignore_errors=WINDOWS)  # which keeps what a virus scanner has open
    return removed


def facts_differ(sealed: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Facts of a checkpoint that differ `now`, one line each."""
    changed = {name: was for name, was in sealed.items() if name in now and was != now[name]}
    return [
        f"{_HASHED[name]}: {was[:12]}, now {now[name][:12]}" if name in _HASHED else f"{name} was {was} and is now {now[name]}"
        for name, was in changed.items()
    ]


def _seal_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _by_step(checkpoints: Path) -> list[tuple[int, Path]]:
    by_step = [(int(match[1]), path) for path in checkpoints.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return sorted(by_step, reverse=True)
