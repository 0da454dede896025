"""Base adapter of a continued run: check, copy, load."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError
from finetune.files import MANIFEST, read_object, require_unchanged, write_json, write_manifest
from finetune.model.configuration import ADAPTER_CONFIG, CONFIG
from finetune.model.weights import ADAPTER_WEIGHTS, adapter_problems, weights_fingerprint
from finetune.recipe.complete import read_base_adapter
from finetune.run.directory import RunDirectory
from finetune.settings import Settings

_FACTS = "origin.json"  # facts of the adapter, in RUN/origin
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True)
class BaseAdapterFacts:
    """Origin of an adapter; None for facts that other programs do not record."""

    name: str  # run or folder
    step: int | None = None
    eval_loss: float | None = None
    base: str | None = None  # hash of the base model's weights

    def summary(self) -> str:
        """Return a summary: `runs/first (step 40, held-out loss 0.0123)`."""
        parts = [f"step {self.step:,}"] if self.step is not None else []
        parts += [f"held-out loss {self.eval_loss:.4f}"] if self.eval_loss is not None else []
        return f"{self.name} ({', '.join(parts)})" if parts else self.name


def require_usable_adapter(settings: Settings) -> None:
    """Raise RecipeError for a missing or changed adapter, or an adapter of another base model."""
    if settings.adapter_name_or_path is None:
        return
    adapter = read_base_adapter(settings.adapter_name_or_path)
    if not (adapter.folder / ADAPTER_WEIGHTS).is_file():
        raise RecipeError(f"adapter_name_or_path {adapter.folder} has no {ADAPTER_WEIGHTS}", "Save it as safetensors.")
    # PEFT's own adapters have no manifest
    require_unchanged(adapter.folder, RecipeError, "Train it again, or give another adapter.", required=False)
    if problems := adapter_problems(adapter.folder):
        problems = [f"the adapter in {adapter.folder} can't be loaded: {problem}" for problem in problems]
        raise RecipeError(problems, "Give another adapter.")
    adapter_base, recipe_base = facts_of(adapter.folder).base, weights_fingerprint(settings)
    if adapter_base is None and adapter.base_model and (Path(adapter.base_model) / CONFIG).is_file():
        # a local folder: the recipe may spell its path in another way
        adapter_base = weights_fingerprint(settings.model_copy(update={"model_name_or_path": adapter.base_model}))
    if adapter_base is not None and recipe_base is not None:
        is_other_base = adapter_base != recipe_base
    else:  # only names on the hub can be compared: a folder of another machine is unknown here
        is_hub_name = bool(_HUB_NAME.fullmatch(adapter.base_model or ""))
        is_other_base = is_hub_name and adapter.base_model != settings.model_name_or_path
    if is_other_base:
        bases = f"{adapter.base_model}, and the recipe has {settings.model_name_or_path}"
        problem = f"the adapter in {adapter.folder} was trained on other base weights: {bases}"
        fix = "An adapter only fits the weights that it was trained on: set model_name_or_path to that model."
        raise RecipeError(problem, fix)


def facts_of(folder: Path) -> BaseAdapterFacts:
    """Return the facts of the adapter in a folder."""
    manifest = read_object(folder / MANIFEST) or {}
    base = manifest.get("facts", {}).get("base")
    run = folder.parents[1] if folder.name.startswith("checkpoint-") else folder.parent
    name = str(run if (run / "plan.json").is_file() else folder)
    return BaseAdapterFacts(name, manifest.get("step"), manifest.get("eval_loss"), base)


def copy_base_adapter(run: RunDirectory, folder: Path) -> None:
    """Copy the adapter in `folder` into `run`: the adapter's run can be deleted afterwards."""
    run.base_adapter.mkdir()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        shutil.copyfile(folder / name, run.base_adapter / name)
    write_json(run.base_adapter / _FACTS, asdict(facts_of(folder)))
    write_manifest(run.base_adapter, {})


def base_adapter_of(run: RunDirectory) -> BaseAdapterFacts | None:
    """Return the facts of the adapter that a run continued from."""
    values = read_object(run.base_adapter / _FACTS)
    return BaseAdapterFacts(**values) if values else None


def load_base_adapter(model: Any, run: RunDirectory) -> None:
    """Load the run's base adapter into `model`. Raises RecipeError."""
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    require_unchanged(run.base_adapter, RecipeError, f"Start a new run: finetune run {run.recipe}")
    tensors = load_file(run.base_adapter / ADAPTER_WEIGHTS)
    if not_finite := [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]:
        problem = f"the adapter in {run.base_adapter} has non-finite values: {', '.join(not_finite[:3])}"
        raise RecipeError(problem, "Continue from another adapter.")
    try:
        load_result: Any = set_peft_model_state_dict(model, tensors)
    except (RuntimeError, KeyError, ValueError) as error:  # such as tensors with other shapes
        raise RecipeError(f"the adapter in {run.base_adapter} does not fit the model: {str(error).splitlines()[0]}") from None
    mismatched = [*load_result.unexpected_keys, *(key for key in load_result.missing_keys if ".lora_" in key)]
    if mismatched:
        layers = ", ".join(mismatched[:3])
        problem = f"the adapter in {run.base_adapter} and target_modules name different layers: {layers}"
        raise RecipeError(problem, "Leave out target_modules: the adapter sets them.")
