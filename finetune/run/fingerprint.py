"""Hashes and settings that determine a result: sealed with the result, compared at each use."""

from __future__ import annotations

import contextlib
import os
import shlex
from pathlib import Path
from typing import Any

from finetune.errors import CommandError, ModelError
from finetune.files import MANIFEST, read_object, require_unchanged, sha256_of
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
from finetune.run.seal import fact_differences
from finetune.settings import Settings
from finetune.settings.schema import Decides, settings_that_decide

_HASHES = {"data", "base", "base_config", "origin"}
#: Not compared by name: hashes identify the base model and the rows wherever they are.
_INPUT_NAMES = {"model_name_or_path", "model_revision", "adapter_name_or_path", "dataset"}


def seal_facts(plan: Plan, run: RunDirectory, *, base: bool = True) -> dict[str, Any]:
    """Return the facts for a checkpoint's manifest. `base`: with hashes of the base model's files."""
    values = plan.settings.model_dump(mode="json")
    facts = {name: values[name] for name in settings_that_decide(Decides.RESULT | Decides.EXACTNESS)}
    with contextlib.suppress(FileNotFoundError):  # merging a finished adapter does not need the rows
        facts["data"] = (run.data / "fingerprint").read_text(encoding="utf-8")
    if base:
        facts |= _base_facts(plan.settings)
    if (origin := run.base_adapter / ADAPTER_WEIGHTS).is_file():
        facts["origin"] = sha256_of(origin)
    return facts


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
