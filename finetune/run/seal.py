"""Sealed checkpoints: valid only with an intact manifest, whose facts determine the result and are compared at each use."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.distributed import this_rank
from finetune.errors import CommandError, ModelError
from finetune.files import MANIFEST, changes_in, read_json, read_object, require_unchanged, sha256_of, write_manifest
from finetune.model.weights import (
    ADAPTER_WEIGHTS,
    adapter_problems,
    configuration_fingerprint,
    generation_fingerprint,
    weights_fingerprint,
)  # fmt: skip
from finetune.planner.plan import Plan, read_plan
from finetune.run.directory import RunDirectory
from finetune.run.retry import adjusted_plan
from finetune.settings import Settings
from finetune.settings.schema import Decides, settings_that_decide
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


_HASHES = {"data", "base", "base_config", "origin"}
#: Not compared by name: hashes identify the base model and the rows wherever they are.
_INPUT_NAMES = {"model_name_or_path", "model_revision", "adapter_name_or_path", "dataset"}


def seal_facts(plan: Plan, run: RunDirectory, *, base: bool) -> dict[str, Any]:
    """Return the facts for a checkpoint's manifest. `base`: with hashes of the base model's files."""
    values = plan.settings.model_dump(mode="json")
    facts = {name: values[name] for name in settings_that_decide(Decides.RESULT | Decides.EXACTNESS)}
    with contextlib.suppress(FileNotFoundError):  # merging a finished adapter does not need the rows
        facts["data"] = (run.data / "fingerprint").read_text(encoding="utf-8")
    if base:
        facts |= _base_facts(plan.settings)
    if (origin := run.base_adapter / ADAPTER_WEIGHTS).is_file():
        facts["origin"] = sha256_of(origin)
    return {**facts, "num_processes": this_rank().world_size}


def _base_facts(settings: Settings) -> dict[str, str]:
    # empty without local files
    hashes = {
        "base": weights_fingerprint(settings), "base_config": configuration_fingerprint(settings),
        "base_generation": generation_fingerprint(settings),
    }  # fmt: skip
    return {name: value for name, value in hashes.items() if value is not None}


def deciding_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the facts that must be equal to resume."""
    # a change of other facts only makes resuming inexact
    names = {*settings_that_decide(Decides.RESULT), *_HASHES} - _INPUT_NAMES
    return {name: value for name, value in facts.items() if name in names}


def require_own_adapter(run: RunDirectory, folder: Path, *, base: bool = True) -> None:
    """Raise CommandError unless `folder` has an intact adapter of this run and, with `base`, of its base model."""
    if not folder.is_dir():
        raise CommandError(f"{run.path} has no adapter yet", f"Finish it: finetune resume {run.path}")
    if base:
        require_base(run)
    fix = f"Delete or rename {folder} to use the newest sealed checkpoint, or train again."
    require_unchanged(folder, CommandError, fix)
    if problems := adapter_problems(folder):
        raise CommandError([f"the adapter in {folder} can't be loaded: {problem}" for problem in problems], fix)
    sealed = _sealed_facts(folder)
    if not sealed:
        return
    plan = adjusted_plan(run)
    if differences := fact_differences(sealed, deciding_facts(seal_facts(plan, run, base=False))):
        raise CommandError([f"{folder} belongs to another run: {line}" for line in differences[:5]], fix)
    if base:
        require_same_base(folder, plan.settings)


def require_same_base(folder: Path, settings: Settings) -> None:
    """Raise CommandError when the adapter in `folder` was trained on another base model."""
    sealed = _sealed_facts(folder)
    if not {"base", "base_config"} & set(sealed):  # the training machine had no local files to hash
        return
    if differences := fact_differences(sealed, _base_facts(settings)):
        raise CommandError(
            [f"the adapter in {folder} can't be used with {settings.model_name_or_path}: {line}" for line in differences],
            "An adapter only fits the base model that it was trained on: restore that model's files.",
        )


def require_base(run: RunDirectory) -> None:
    """Raise ModelError if the base model's folder is missing."""
    folder = Path(os.path.expanduser(read_plan(run.plan).settings.model_name_or_path))  # noqa: PTH111 - pathlib raises for an unknown user
    if folder.is_absolute() and not folder.is_dir():
        fix = f"If it has moved: ln -s NEW_FOLDER {shlex.quote(str(folder))}"
        raise ModelError(f"the base model's folder is missing: {folder}", fix)


def _sealed_facts(folder: Path) -> dict[str, Any]:
    return (read_object(folder / MANIFEST) or {}).get("facts") or {}
