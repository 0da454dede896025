"""The inputs of a result (settings, rows, base model), as facts that are sealed with the result and compared at each use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from finetune.errors import CommandError, ModelError
from finetune.files import read_json, read_object, sha256_of, write_json
from finetune.manifest import MANIFEST, require_unchanged
from finetune.model.adapter_files import adapter_problems
from finetune.model.weights import (
    ADAPTER_WEIGHTS,
    configuration_fingerprint,
    generation_fingerprint,
    weights_fingerprint,
)  # fmt: skip
from finetune.planner.plan import Plan, read_plan
from finetune.run.directory import RunDirectory
from finetune.run.retry import adjusted_plan
from finetune.run.seal import facts_differ
from finetune.settings import Settings
from finetune.settings.base_formats import base_format_of
from finetune.settings.schema import Decides, settings_that_decide

_HASHES = {"data", "base", "base_config", "origin", "reference"}
#: The hashes of the base model say what it is, wherever it is; the rows' hash is `data`.
_NAMES_OF_INPUTS = {"model_name_or_path", "model_revision", "adapter_name_or_path", "dataset"}


def seal_facts(plan: Plan, run: RunDirectory, *, base: bool = True) -> dict[str, Any]:
    """Facts in a checkpoint's manifest: every setting that changes the result, and the hashes of data and (`base`) model.

    The base model's files are read for their hash, unless the run reads its folder of quantised weights, which is verified.
    """
    values = plan.settings.model_dump(mode="json")
    facts = {name: values[name] for name in settings_that_decide(Decides.RESULT | Decides.EXACTNESS)}
    with contextlib.suppress(FileNotFoundError):  # a finished adapter is merged without its rows
        facts["data"] = (run.data / "fingerprint").read_text(encoding="utf-8")
    if base:
        facts |= base_facts(plan.settings, reread=not reads_own_file(plan.settings))
    if (origin := run.base_adapter / ADAPTER_WEIGHTS).is_file():
        facts["origin"] = sha256_of(origin)
    return facts


def reads_own_file(settings: Settings) -> bool:
    """Whether the base model is read from this project's folder of quantised weights, which is verified when it is opened."""
    return settings.layer_offloading is not False and bool(base_format_of(settings).quantised_file)


def base_facts(settings: Settings, *, reread: bool = False) -> dict[str, str]:
    """Hashes of the base model's weights and configurations; none where it is not on this disk. Raises ModelError."""
    hashes = {
        "base": weights_fingerprint(settings, reread=reread), "base_config": configuration_fingerprint(settings),
        "base_generation": generation_fingerprint(settings),
    }  # fmt: skip
    return {name: value for name, value in hashes.items() if value is not None}


def deciding_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """Facts that must be equal to resume from a checkpoint; when others change, resuming is not bit-exact."""
    names = {*settings_that_decide(Decides.RESULT), *_HASHES} - _NAMES_OF_INPUTS
    return {name: value for name, value in facts.items() if name in names}


def require_own_adapter(run: RunDirectory, folder: Path, *, base: bool = True, reread: bool = False) -> None:
    """Raise CommandError when the adapter in a folder is not what this run wrote, or (`base`) the base model is another.

    `reread`: hash the base model's files, whatever their time is.
    """
    if not folder.is_dir():
        raise CommandError(f"{run.path} has no adapter yet", f"Finish it: finetune resume {run.path}")
    if base:
        find_base(run)
    fix = f"Delete or rename {folder} to use the newest sealed checkpoint, or train again."
    require_unchanged(folder, CommandError, fix)
    if problems := adapter_problems(folder):
        raise CommandError([f"the adapter in {folder} can't be loaded: {problem}" for problem in problems], fix)
    sealed = _sealed_facts(folder)
    if not sealed:
        return
    plan = adjusted_plan(run)
    own = deciding_facts(seal_facts(plan, run, base=False))
    if folder.parent == run.path:  # a retry may have lowered it since a checkpoint
        own["learning_rate"] = plan.settings.learning_rate
    if differences := facts_differ(sealed, own):
        raise CommandError([f"{folder} is not of this run: {line}" for line in differences[:5]], fix)
    if base:
        require_same_base(folder, plan.settings, reread=reread)


def require_same_base(folder: Path, settings: Settings, *, reread: bool = False) -> None:
    """Raise CommandError when the adapter in a folder was trained on another base model."""
    sealed = _sealed_facts(folder)
    if not {"base", "base_config"} & set(sealed):  # trained on a machine without the files
        return
    if differences := facts_differ(sealed, base_facts(settings, reread=reread)):
        raise CommandError(
            [f"the adapter in {folder} can't be used with {settings.model_name_or_path}: {line}" for line in differences],
            "An adapter only fits the base model that it was trained on: give its folder (--model), or set model_revision.",
        )


def find_base(run: RunDirectory, name: str | None = None) -> None:
    """Save `name`, if it is given, as the folder where a run's base model is now.

    Raises ModelError when that folder, or the one of before, is missing, and CommandError for another model.
    """
    settings = read_plan(run.plan).settings
    folder = Path(os.path.expanduser(name or settings.model_name_or_path))  # noqa: PTH111 - of an unknown user it stays
    if (name or folder.is_absolute()) and not folder.is_dir():
        raise ModelError(
            f"the folder of the base model is missing: {folder.absolute()}",
            f"If it has moved, give its new path once: finetune {'chat' if run.adapter.is_dir() else 'resume'} {run.path} "
            "--model FOLDER",
        )
    if name is None:
        return
    saved = [run.adapter, *run.checkpoints.glob("checkpoint-*")]
    sealed = next((path for path in saved if "base" in _sealed_facts(path)), None)
    if sealed is None:
        raise CommandError(
            f"{run.path} has no checkpoint yet, and so no hash of its base model",
            f"Start a new run: finetune run {run.recipe} --model {name}",
        )
    require_same_base(sealed, settings.model_copy(update={"model_name_or_path": str(folder)}))
    values, times = read_json(run.plan, dict, may_be_edited=True), run.plan.stat()
    values.pop("checksum", None)
    write_json(run.plan, {**values, "base_folder": str(folder.absolute())}, checksum=True)
    os.utime(run.plan, ns=(times.st_atime_ns, times.st_mtime_ns))  # which orders the runs


def _sealed_facts(folder: Path) -> dict[str, Any]:
    return (read_object(folder / MANIFEST) or {}).get("facts") or {}
