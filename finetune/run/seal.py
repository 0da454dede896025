"""Sealed checkpoints: valid only with an intact manifest."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.files import MANIFEST, changes_in, read_json, read_object, write_manifest
from finetune.system import WINDOWS, rename, sync_folder

_NAME = re.compile(r"checkpoint-(\d+)")
#: Facts that are hashes, and the message when they differ.
_HASHED = {"data": "the training data has changed", "base": "the base model's weights have changed",
           "base_config": "the base model's config.json or index has changed",
           "origin": "the adapter that training continued from has changed",
           "base_generation": "the base model's generation_config.json has changed"}  # fmt: skip


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint."""

    path: Path
    step: int
    facts: dict[str, Any]


def seal(folder: Path, target: Path, step: int, facts: dict[str, Any]) -> Path:
    """Hash and sync `folder`, write the manifest last, rename to `target`. On OSError `target` does not exist."""
    write_manifest(folder, {"step": step, "facts": facts})
    if target.exists():  # an earlier attempt died after sealing this step
        shutil.rmtree(target)
    rename(folder, target)
    sync_folder(target.parent)
    return target


def verify(folder: Path) -> list[str]:
    """Return the problems of a checkpoint; empty for an intact checkpoint."""
    if not os.path.exists(folder / MANIFEST):  # noqa: PTH110 - no error for a folder that can't be entered
        return ["it is incomplete (no manifest): the run died while writing it"]
    problems = changes_in(folder)
    step = (read_object(folder / MANIFEST) or {}).get("step")
    if not problems and folder.name != f"checkpoint-{step}":
        return [f"its manifest is for step {step}"]
    return problems


def newest_verified(checkpoints: Path, before: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """Return the newest intact checkpoint, below step `before`, and a line per skipped checkpoint."""
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
    """Remove all but the newest `keep` checkpoints and step `best`."""
    sealed = [path for _, path in _by_step(checkpoints) if (path / MANIFEST).is_file()]
    # older checkpoints are needed where one of the newest is damaged
    if len(sealed) <= keep or any(map(verify, sealed[:keep])):
        return []
    removed = [path for path in sealed[keep:] if path.name != f"checkpoint-{best}"]
    for path in removed:
        shutil.rmtree(path, ignore_errors=WINDOWS)  # a virus scanner may hold files open
    return removed


def fact_differences(sealed: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line per sealed fact with another value in `now`."""
    changed = {name: was for name, was in sealed.items() if name in now and was != now[name]}
    return [
        f"{_HASHED[name]}: {was[:12]}, now {now[name][:12]}" if name in _HASHED else f"{name} was {was} and is now {now[name]}"
        for name, was in changed.items()
    ]


def _by_step(checkpoints: Path) -> list[tuple[int, Path]]:
    by_step = [(int(match[1]), path) for path in checkpoints.glob("checkpoint-*") if (match := _NAME.fullmatch(path.name))]
    return sorted(by_step, reverse=True)
