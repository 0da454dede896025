"""The recipe of a command."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from finetune.errors import CommandError, RecipeError
from finetune.files import expanded
from finetune.hub import REPO_ID
from finetune.recipe import NO_DATASET, find_recipe, load_recipe, parse_recipe
from finetune.settings import Recipe
from finetune.units import parse_bytes


def recipe_of(source: str | None, overrides: list[str], *, model: str | None = None, data: str | None = None) -> Recipe:
    """Return the recipe of a command's arguments. Raises RecipeError."""
    if source and "=" in source and not Path(source).exists():  # finetune run --model X lora_r=8
        overrides, source = [source, *overrides], None
    from finetune.model.configuration import ADAPTER_CONFIG, refuse_non_model

    if source is None and model is None:
        raise CommandError(
            "a recipe or a model is missing", "Give a recipe (`finetune recipes` lists them), or a model's name."
        )
    path = expanded(model or str(source))
    if model or path.suffix == ".gguf" or (path / ADAPTER_CONFIG).is_file():  # no recipe: must be a model
        refuse_non_model(path, str(path))
    if source is not None and (model is not None or not _is_model(source)):
        recipe = load_recipe(source, with_model_and_data(overrides, model, data))
    else:
        name = model or str(source)
        # JSON is valid YAML: it quotes a name with colons or quotes
        text = f"model_name_or_path: {json.dumps(name)}\ndataset: {{path: {NO_DATASET}}}\n"
        recipe = parse_recipe(text, name, with_model_and_data(overrides, None, data))
    adapter = recipe.adapter_name_or_path
    if adapter is None or (expanded(adapter) / ADAPTER_CONFIG).is_file():
        return recipe
    from finetune.run.directory import open_run

    with suppress(CommandError):  # not a run's name: left as typed
        recipe = recipe.model_copy(update={"adapter_name_or_path": str(open_run(adapter).path)})
    return recipe


def with_model_and_data(overrides: list[str], model: str | None, data: str | None) -> list[str]:
    """Prepend `--model` and `--data` as overrides."""
    options = {"model_name_or_path": model, "dataset.path": data}  # first: a later override of the same setting wins
    return [f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None] + overrides


def option_bytes(option: str, text: str | None) -> int | None:
    """Parse an option such as 22.1GiB. Raises CommandError."""
    try:
        return None if text is None else parse_bytes(text)
    except ValueError as error:
        raise CommandError(f"{option}: {error}") from None


def require_dataset(recipe: Recipe) -> None:
    """Raise CommandError if a recipe has no dataset."""
    if recipe.dataset.path == NO_DATASET:
        raise CommandError("no dataset is given", "Add --data FILE, or a hub dataset's id.")


def _is_model(source: str) -> bool:
    # raises RecipeError if `source` is neither a model nor a recipe
    path = expanded(source)
    if (path / "config.json").is_file():
        return True
    try:
        find_recipe(source)
    except RecipeError as error:
        from finetune.model.configuration import FROM_CONFIG
        from finetune.model.names import resolve, suggestions

        if path.exists() or path.suffix in (".yaml", ".yml", ".json"):
            raise
        # OWNER/NAME is a model on the hub, unless OWNER is a local folder: then it is a misspelt path
        if resolve(source) or (REPO_ID.fullmatch(source) and not path.parent.exists()):
            return True
        similar = suggestions(source)
        models = f" Or the model {' or '.join(similar)}?" if similar else ""
        is_near_a_recipe = "Did you mean" in error.fix and not similar
        others = "" if is_near_a_recipe else f" A model of another name: {FROM_CONFIG}."
        raise RecipeError(error.problems, f"{error.fix}{models}{others}") from None
    return False
