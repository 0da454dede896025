"""Sealed checkpoints: a checkpoint is valid only if its manifest has the hash of every file and all are synced to disk."""

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

from finetune.system import WINDOWS, rename, sync_file, sync_folder

MANIFEST = "MANIFEST.json"
_NAME = re.compile(r"checkpoint-(\d+)")


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
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor(1) as disk:  # hash while the disk syncs
        synced = [disk.submit(sync_file, path) for path in paths]
        files = {path.relative_to(folder).as_posix(): {"sha256": _sha256(path), "bytes": path.stat().st_size} for path in paths}
        for done in synced:
            done.result()
    manifest = {"step": step, "files": files, "facts": facts}
    manifest["seal"] = _seal_of(manifest)
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)
    if target.exists():  # written by an attempt that died between sealing and its next step
        shutil.rmtree(target)
    rename(folder, target)
    sync_folder(target.parent)
    return target


def verify(folder: Path) -> list[str]:
    """What is wrong with a checkpoint, one line each; empty when every file is unchanged."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, step = dict(manifest["files"]), int(manifest["step"])
        if manifest.pop("seal") != _seal_of(manifest):
            return ["its manifest has changed since it was sealed"]
    except FileNotFoundError:
        return ["it is incomplete (no manifest): the run died while writing it"]
    except (ValueError, KeyError, TypeError, OSError):
        return ["its manifest can't be read"]
    problems = []
    if folder.name != f"checkpoint-{step}":
        problems.append(f"its manifest is for step {step}")
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            problems.append(f"{name} is missing")
        elif path.stat().st_size != expected["bytes"]:
            problems.append(f"{name} has {path.stat().st_size:,} bytes, not the {expected['bytes']:,} in the manifest")
        elif _sha256(path) != expected["sha256"]:
            problems.append(f"{name} has changed since it was sealed")
    return problems


def newest_verified(checkpoints: Path, before: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest intact checkpoint (before step `before`, if given), and a line for each newer one that was skipped."""
    skipped: list[str] = []
    for step, path in _by_step(checkpoints):
        if before is not None and step >= before:
            continue
        problems = verify(path)
        if not problems:
            facts = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["facts"]
            return Checkpoint(path, step, facts), skipped
        skipped.append(f"{path.name} skipped: {'; '.join(problems[:3])}")
    return None, skipped


def rotate(checkpoints: Path, keep: int) -> list[Path]:
    """Remove all but the newest `keep` checkpoints, unless the newest is damaged. Returns the removed ones."""
    sealed = [path for _, path in _by_step(checkpoints) if (path / MANIFEST).is_file()]
    if len(sealed) <= keep or verify(sealed[0]):
        return []
    for path in sealed[keep:]:
        shutil.rmtree(path, ignore_errors=WINDOWS)  # which keeps what a virus scanner has open
    return sealed[keep:]


def facts_differ(sealed: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Facts of a checkpoint that differ `now`, one line each. Facts that an earlier version did not write are skipped."""
    return [f"{name} was {was} and is now {now[name]}" for name, was in sealed.items() if name in now and was != now[name]]


def _seal_of(manifest: dict[str, Any]) -> str:
    """The manifest's own checksum, over everything in it but itself."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _by_step(checkpoints: Path) -> list[tuple[int, Path]]:
    found = [(int(match[1]), path) for path in checkpoints.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return sorted(found, reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
