"""Complete a recipe from its model, adapter and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError
from finetune.files import from_json, read_json
from finetune.model.configuration import ADAPTER_CONFIG, match_name, vocabulary_size
from finetune.model.weights import config_problems
from finetune.settings import AUTO, Recipe, Settings, resolved
from finetune.settings.compatibility import ONLY_WITH_VISION

#: Settings that decide an adapter's parameters and their scale.
_ADAPTER_SETTINGS = ("lora_r", "lora_alpha", "target_modules", "use_dora", "use_rslora", "new_tokens", "trained_embedding_rows")
#: The only values of adapter_config.json with which finetune can train an adapter.
_SUPPORTED_VALUES: dict[str, Any] = {
    "bias": "none", "modules_to_save": None, "layers_to_transform": None, "layers_pattern": None, "rank_pattern": {},
    "alpha_pattern": {}, "layer_replication": None, "trainable_token_indices": None, "megatron_config": None,
}  # fmt: skip


@dataclass(frozen=True)
class BaseAdapter:
    """An adapter to continue from."""

    folder: Path
    settings: dict[str, Any]
    base_model: str | None


def complete(recipe: Recipe) -> tuple[Recipe, str, dict[str, str]]:
    """Return the completed recipe, a note on its model's name, and a reason for each new setting. Raises RecipeError."""
    # done once: later code only reads the names, the method and the adapter's settings
    recipe, note = named_model(recipe)
    reasons: dict[str, str] = {}
    if recipe.method == AUTO:
        from finetune.data.row_parser import method_of_rows

        method, reasons["method"] = method_of_rows(recipe.dataset)
        recipe = _resolved_because(recipe, f"method {method}, because {reasons['method']}", method=method)
    if recipe.adapter_name_or_path is None:
        return recipe, note, reasons
    adapter = read_base_adapter(recipe.adapter_name_or_path)
    inherited = _inherited(recipe, adapter)
    reasons |= dict.fromkeys(inherited, "from the continued adapter")
    inherited["adapter_name_or_path"] = str(adapter.folder)
    return _resolved_because(recipe, f"with the settings of the adapter in {adapter.folder}", **inherited), note, reasons


def complete_for_rows(recipe: Recipe, token_rows: Sequence[int], *, has_pictures: bool) -> tuple[Recipe, dict[str, str]]:
    """Return a completed recipe with the settings that its rows need, and a reason for each. Raises RecipeError."""
    # `token_rows`: first and end of the embedding rows of new tokens, empty if the tokenizer was not read
    rows, set_rows, reasons = list(token_rows), recipe.trained_embedding_rows, {}
    if not rows and not set_rows and recipe.new_tokens and (size := vocabulary_size(recipe)):
        rows = [size, size + len(recipe.new_tokens)]
    if rows and set_rows and rows != set_rows:
        raise RecipeError(
            f"trained_embedding_rows is {set_rows}; the tokenizer gives the new tokens rows {rows}",
            "Leave it out. A continued adapter needs the same new_tokens.",
        )
    if rows := rows or set_rows:
        new_tokens = f"{rows[1] - rows[0]:,} new token(s) from row {rows[0]:,} on"
        reasons["trained_embedding_rows"] = f"{new_tokens}: their rows are trained"
        recipe = resolved(recipe, trained_embedding_rows=rows)
    if recipe.vision is False and has_pictures:
        raise RecipeError("the rows have images, but vision is false", "Set vision=auto, or remove the images.")
    if not has_pictures and recipe.vision is not True and recipe.train_vision == "none":
        return recipe, reasons
    if not has_pictures:
        setting = "vision is true" if recipe.vision is True else f"train_vision is {recipe.train_vision}"
        raise RecipeError(
            f"{setting}, but no row with an image was read, so the memory of images is unknown",
            "Give local rows with images, and the model's processor files next to its config.json.",
        )
    values: dict[str, Any] = {"offloaded_layers": 0} if recipe.offloaded_layers == AUTO else {}
    for name, (value, reason) in ONLY_WITH_VISION.items():
        if getattr(recipe, name) == AUTO:
            values[name], reasons[name] = value, reason
    reasons |= {"vision": "the rows have images"} if recipe.vision == AUTO else {}
    try:
        return resolved(recipe, vision=True, **values), reasons
    except ValueError as error:
        raise RecipeError(str(error).splitlines(), "Remove these settings, or the images.") from None


def named_model(recipe: Recipe) -> tuple[Recipe, str]:
    """Return the recipe with a hub id for an informal model name, and a note."""
    name, note = match_name(recipe.model_name_or_path, recipe.model_revision)
    return resolved(recipe, model_name_or_path=name), note


def _resolved_because(recipe: Recipe, reason: str, **values: Any) -> Recipe:
    try:
        return resolved(recipe, **values)
    except ValueError as error:
        raise RecipeError(f"{reason}: {error}") from None


def _inherited(recipe: Recipe, adapter: BaseAdapter) -> dict[str, Any]:
    inherited, problems = {}, {}
    sets_format = bool(recipe.requested_formats)
    for name, value in adapter.settings.items():
        # settings outside _ADAPTER_SETTINGS are formats of the base weights; the recipe's format replaces the adapter's
        if name not in _ADAPTER_SETTINGS and sets_format:
            continue
        recipe_value = getattr(recipe, name)
        if recipe_value == AUTO or name not in recipe.model_fields_set:
            inherited[name] = value
        elif name in _ADAPTER_SETTINGS and _comparable(recipe_value) != _comparable(value):
            problems[name] = f"{name} is {recipe_value}; the adapter in {adapter.folder} has {value}"
    if problems:
        fix = f"Leave out {', '.join(problems)}: the adapter's values are used."
        raise RecipeError(list(problems.values()), fix)
    return inherited


def read_base_adapter(name: str) -> BaseAdapter:
    """Read a run's or a PEFT adapter. Raises RecipeError."""
    folder = find_adapter(name)
    path = folder / ADAPTER_CONFIG
    try:
        config = read_json(path, dict)
        path = (folder.parents[1] if folder.name.startswith("checkpoint-") else folder) / "plan.json"
        if not path.is_file():  # another program's adapter
            return BaseAdapter(folder, _settings_of_peft(config, name), config.get("base_model_name_or_path"))
        settings = from_json(Settings, read_json(path, dict, may_be_edited=True).get("plan"))
    except (OSError, ValueError) as error:
        problem = f"adapter_name_or_path {name}: {path} can't be read: {error}"
        raise RecipeError(problem, "Restore it, or give another adapter.") from None
    adapter_settings = {name: getattr(settings, name) for name in _ADAPTER_SETTINGS}
    # an adapter trained on quantised weights fits only these weights
    adapter_settings |= {base_format.setting: True for base_format in settings.requested_formats}
    return BaseAdapter(folder, adapter_settings, settings.model_name_or_path)


def find_adapter(name: str) -> Path:
    """Return an adapter's folder by path or run name. Raises RecipeError."""
    path = Path(name).expanduser()
    runs = (path, Path("runs") / name)
    for folder in (path, *(run / "adapter" for run in runs)):
        if (folder / ADAPTER_CONFIG).is_file():
            return folder
    for run in runs:
        if (run / "plan.json").is_file():
            raise RecipeError(f"adapter_name_or_path {name}: the run has no adapter yet", f"Finish it: finetune resume {run}")
    raise RecipeError(
        f"adapter_name_or_path {name} is neither a run nor a folder with {ADAPTER_CONFIG}",
        "Give a run (`finetune runs` lists them), or an adapter's folder. From the hub: hf download NAME --local-dir FOLDER",
    )


def _settings_of_peft(config: dict[str, Any], name: str) -> dict[str, Any]:
    if problems := config_problems(config):
        raise RecipeError([f"adapter_name_or_path {name}: {problem}" for problem in problems])
    unsupported = [] if config.get("peft_type") == "LORA" else [f"peft_type {config.get('peft_type')}"]
    for key, supported in _SUPPORTED_VALUES.items():
        if config.get(key) not in (supported, None, [], {}):
            unsupported.append(f"{key} {config[key]}")
    layers, parameters = config.get("target_modules"), config.get("target_parameters") or []
    targets = layers if isinstance(layers, str) else sorted({*(layers or []), *parameters})
    if not targets or not isinstance(config.get("r"), int) or not config.get("lora_alpha"):
        unsupported.append("no r, lora_alpha or target_modules")
    if unsupported:
        raise RecipeError(f"adapter_name_or_path {name}: finetune can't continue an adapter with {', '.join(unsupported)}")
    return {
        "lora_r": config["r"], "lora_alpha": float(config["lora_alpha"]), "target_modules": targets,
        "use_dora": bool(config.get("use_dora")), "use_rslora": bool(config.get("use_rslora")),
    }  # fmt: skip


def _comparable(value: Any) -> Any:
    return sorted(value) if isinstance(value, list) else value
