"""Load and validate a recipe with `key=value` overrides; report all problems with lines and fixes."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Sequence
from os.path import isdir  # False for a name that no folder can have
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from finetune.bundled import model_path
from finetune.errors import SECRET, RecipeError
from finetune.recipe import yaml
from finetune.recipe.yaml import Values
from finetune.settings.schema import ALIASES, SWITCHES, DatasetRecipe, LaunchRecipe, Recipe

#: The dataset of a plan without data.
NO_DATASET = "none"
_LIST_FIX = "`finetune recipes` lists the shipped ones."
_DATA_SUFFIXES = {".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow"}
_SECTIONS: dict[str, type[BaseModel]] = {"dataset": DatasetRecipe, "launch": LaunchRecipe}
_TOKENIZER_TOKEN = re.compile(r"(^|_)(pad|padding|eos|bos|unk|sep|cls|mask|eot|image|video|audio|concat|new)_token$", re.I)
_SECRET_NAME = re.compile(r"(^|_)(token|api_key|apikey|password|secret)($|_)", re.I)


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a recipe file or a shipped recipe. Raises RecipeError with all problems."""
    path = find_recipe(source)
    recipe = parse_recipe(read_text(path), str(source), overrides)
    # folders are relative to the working folder, else to the recipe's folder
    for name in ("model_name_or_path", "adapter_name_or_path"):
        value = getattr(recipe, name)
        if value and not model_path(value) and not isdir(value) and isdir(beside := path.parent / value):  # noqa: PTH112
            recipe = recipe.model_copy(update={name: str(beside)})
    return recipe


def parse_recipe(text: str, name: str = "recipe", overrides: Sequence[str] = ()) -> Recipe:
    """Parse a recipe; `name` prefixes each problem."""
    document = yaml.parse(text, name)
    locations = {path: f"{name}:{line}" for path, line in document.lines.items()}
    for override in overrides:
        apply_override(override, document.values, locations)
    return validate(document.values, locations, name, document.problems)


def recipe_from(values: Values) -> Recipe:
    """Validate plain values. Raises RecipeError with all problems."""
    return validate(values, {}, "recipe")


def load_changes(overrides: list[str]) -> Values:
    """Return overrides by canonical name, not validated. Raises RecipeError."""
    values: Values = {}
    for override in overrides:
        apply_override(override, values, {})
    names, unknown = [*Recipe.model_fields, *ALIASES], [key for key in values if key not in Recipe.model_fields]
    if unknown:
        raise RecipeError([f"unknown setting '{key}'{_did_you_mean(key, names)}" for key in unknown])
    return values


def write_recipe(recipe: Recipe) -> str:
    """Return a recipe's explicit settings as YAML, which `parse_recipe` reads back."""
    return yaml.dump(recipe.model_dump(exclude_unset=True, mode="json"))


def shipped_recipes() -> dict[str, Path]:
    """Return the paths of the shipped recipes by name."""
    module_path = Path(__file__).resolve()
    folders = (module_path.parents[2] / "recipes", module_path.parents[1] / "recipes")  # a checkout, an installed wheel
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def find_recipe(source: str | Path) -> Path:
    """Find a recipe by path or shipped name. Raises RecipeError."""
    path, shipped = Path(source), shipped_recipes()
    try:
        if path.is_file():
            if {suffix.lower() for suffix in path.suffixes} & _DATA_SUFFIXES:
                argument = shlex.quote(f"dataset.path={path}")
                fix = f"Name a recipe, then the data: finetune run tiny-cpu {argument}"
                raise RecipeError(f"{path} is data, not a recipe", fix)
            return path
    except OSError as error:  # a name too long for the file system
        raise RecipeError(f"{str(source)[:60]}... is not a recipe: {error.strerror}", _LIST_FIX) from None
    if path.is_dir():
        fix = f"If it is a run directory: finetune run {source}/recipe.yaml"
        raise RecipeError(f"{source} is a directory, not a recipe", fix)
    if path.stem in shipped and path.parent.name in ("", "recipes"):
        return shipped[path.stem]
    similar = difflib.get_close_matches(path.stem, shipped, n=3, cutoff=0.4)
    hint = f"Did you mean {', '.join(similar)}? " if similar else ""
    raise RecipeError(f"there is no recipe {source}", f"{hint}{_LIST_FIX}")


def read_text(path: Path) -> str:
    """Read a recipe file. Raises RecipeError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise RecipeError(f"{path}: can't be read: {error.strerror}") from None
    try:
        return data.decode("utf-8-sig")  # editors on Windows write a byte order mark
    except UnicodeDecodeError:
        # UTF-16 has zero bytes, too, after a byte order mark
        if b"\0" in data[:4096] and not data.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise RecipeError(f"{path}: is not text; a recipe is a YAML file", _LIST_FIX) from None
        fix = f"Convert it: iconv -f UTF-16 (or LATIN1) -t UTF-8 {path} > fixed.yaml"
        raise RecipeError(f"{path}: is not UTF-8 text", fix) from None


def apply_override(override: str, values: Values, locations: dict[str, str]) -> None:
    """Apply a `key=value` override to `values`. Raises RecipeError."""
    key, separator, text = override.partition("=")
    if not separator or not key.strip():
        fix = "Write key=value, for example lora_r=32 or dataset.path=data.jsonl"
        raise RecipeError(f"'{override}' is not an override", fix)
    *parents, leaf = key.strip().lstrip("-").split(".")  # --lora_r=32 is a habit from other tools
    target = values
    for parent in parents:
        nested = target.get(parent)
        if nested is None:
            nested = target[parent] = {}
        if parent == "dataset" and isinstance(nested, (str, list)):  # a dataset may be just a path
            nested = target[parent] = {"path": nested}
        if not isinstance(nested, dict):
            raise RecipeError(f"override {override}: '{parent}' has no nested settings")
        target = nested
    name = leaf if parents else ALIASES.get(leaf, leaf)
    if not parents:  # or the recipe would have the setting twice
        for alias in [key for key in values if ALIASES.get(key) == name]:
            del values[alias]
    value = yaml.parse_value(text)
    if value is None and text.strip() not in ("null", "~", "None"):
        raise RecipeError(f"override {override}: the value is missing", f"Write {key}=VALUE, or {key}=auto")
    target[name] = value
    locations[".".join([*parents, name])] = f"override {override}"


def validate(values: Values, locations: dict[str, str], name: str, problems: Sequence[str] = ()) -> Recipe:
    """Validate values. Raises RecipeError with `problems` and all others."""
    problems, fix = list(problems), ""
    values = _with_canonical_names(values, locations, problems)
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        problems += [_explain(details, locations, name) for details in error.errors()]
        if any(details["type"] == "extra_forbidden" for details in error.errors()):
            fix = "If the file is LLaMA-Factory's, Axolotl's or TRL's:  finetune convert FILE -o recipe.yaml"
        recipe = None
    # one problem per line, without repetitions
    problems = list(dict.fromkeys(line for problem in problems for line in problem.split("\n")))
    if problems or recipe is None:
        raise RecipeError(problems, fix)
    return recipe


def _with_canonical_names(values: Values, locations: dict[str, str], problems: list[str]) -> Values:
    renamed: Values = {}
    for key, value in values.items():
        location, canonical = locations.get(key, key), ALIASES.get(key, key)
        if secret_key := secret_in(key, value):
            problems.append(
                f"{location.partition('=')[0]}: secrets don't belong in a recipe: `hf auth login`, or set HF_TOKEN; "
                f"remove '{secret_key}'"
            )
            continue
        if key in SWITCHES and key not in Recipe.model_fields:  # `bf16: true` means `dtype: bfloat16`
            if value not in (True, "true"):
                continue
            canonical, value = "dtype", SWITCHES[key]
        if value is None and canonical in Recipe.model_fields:  # an empty key is not set
            continue
        if canonical in renamed:
            problems.append(f"{location}: '{key}' and another key both set {canonical}; keep one")
            continue
        if canonical == "dataset" and isinstance(value, (str, list)):
            value = {"path": value}
        if (section := _SECTIONS.get(canonical)) and isinstance(value, dict):
            value = {name: item for name, item in value.items() if item is not None or name not in section.model_fields}
        if canonical != key and key in locations:
            locations[canonical] = locations[key]
        renamed[canonical] = value
    return renamed


def secret_in(key: str, value: Any) -> str | None:
    """Return the dotted name of a secret at any depth, or None."""
    # callers name the key in a message, which must not contain the value
    is_secret_name = _SECRET_NAME.search(key) and not _TOKENIZER_TOKEN.search(key)
    if is_secret_name and value is not None and not isinstance(value, bool):
        return key
    if isinstance(value, str) and SECRET.search(value):
        return key
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    nested_secrets = (secret_in(str(name), item) for name, item in items)
    return next((f"{key}.{name}" for name in nested_secrets if name), None)


def _did_you_mean(key: str, candidates: list[str]) -> str:
    for similar in difflib.get_close_matches(key.lower(), candidates, n=1, cutoff=0.8):
        return f"; did you mean '{ALIASES.get(similar, similar)}'?"
    return "; `finetune recipes keys` lists the settings"


def _explain(details: Any, locations: dict[str, str], name: str) -> str:
    # `details`: an entry of pydantic's ValidationError.errors()
    keys = [str(key) for key in details["loc"]]
    if details["type"] == "value_error":
        return "\n".join(f"{name}: {line}" for line in str(details["ctx"]["error"]).split("\n"))
    if details["type"] == "missing":
        return f"{name}: '{'.'.join(keys)}' is missing{_EXAMPLES.get(keys[0], '')}"
    # the longest path that has a line in the file
    paths = [".".join(keys[:length]) for length in range(len(keys), 0, -1)]
    path = next((path for path in paths if path in locations), ".".join(keys[:2]))
    location = locations.get(path, name)
    if details["type"] == "extra_forbidden":
        fields = [*_SECTIONS[keys[0]].model_fields] if len(keys) > 1 else [*Recipe.model_fields, *ALIASES]
        return f"{location}: unknown setting '{'.'.join(keys)}'{_did_you_mean(keys[-1], fields)}"
    value = details["input"]
    shown_value = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
    hint = details["msg"].replace("Input should", "it should")
    if details["type"].startswith("bool") and isinstance(value, str):
        hint = "write true or false"
    elif details["type"] in ("int_type", "float_type") and isinstance(value, bool):
        hint = "write a number, not true or false"
    return f"{location}: {path} is {shown_value}; {hint}"


_EXAMPLES = {
    "model_name_or_path": "; write, for example, `model_name_or_path: Qwen/Qwen2.5-7B-Instruct`",
    "dataset": "; write, for example, `dataset: {path: data.jsonl}`",
}
