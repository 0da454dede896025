"""Draft: the recipe of the next run; and the models, datasets and GPUs to choose from."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import shlex
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from finetune.card.visible import usable_devices
from finetune.data.readers import READERS
from finetune.errors import RecipeError
from finetune.files import read_object, write_json
from finetune.recipe import load_recipe, parse_recipe, recipe_from, shipped_recipes, write_recipe
from finetune.recipe.yaml import dump
from finetune.settings import Recipe

from .language import mark
from .workspace import Workspace

DEMO_RECIPE = "tiny-cpu"  # bundled model and data, trains on any machine
#: Stand-ins for missing choices, so that the draft can be checked and planned.
_STAND_INS = {"model_name_or_path": "tiny", "dataset": {"path": "support"}}
_MOST_FOUND, _FILES_PER_FOLDER = 12, 50
DATA_ENDINGS = tuple(READERS)


@dataclass(frozen=True)
class DraftState:
    """State of the draft."""

    #: Settings without defaults, as in a recipe file.
    values: dict[str, Any]
    #: `values` with stand-ins for missing choices.
    recipe: Recipe
    #: Changes with each edit.
    stamp: int

    @property
    def model(self) -> str:
        return str(self.values.get("model_name_or_path") or "")

    @property
    def data(self) -> str | list[str]:
        path: str | list[str] = (self.values.get("dataset") or {}).get("path") or ""
        return path

    @property
    def is_complete(self) -> bool:
        return bool(self.model and self.data)

    @property
    def text(self) -> str:
        """The recipe as YAML, without stand-ins."""
        if self.is_complete:
            return write_recipe(self.recipe)
        return dump(self.values) if self.values else ""


class Draft:
    """Reads and changes the draft. Invalid changes raise RecipeError."""

    def __init__(self, workspace: Workspace) -> None:
        # a file: every tab and restart shows the same draft
        self._path, self._lock = workspace.folder("draft") / "draft.json", threading.RLock()

    def read(self) -> DraftState:
        stored = read_object(self._path) or {}
        # another version's settings may be invalid
        with contextlib.suppress(RecipeError, TypeError, ValueError):
            return _checked(stored.get("values") or {}, int(stored.get("stamp") or 0))
        return _checked({}, 0)

    def change(self, **settings: Any) -> DraftState:
        """Set settings by dotted name, with `__` for the dot; None unsets."""
        with self._lock:
            before = self.read()
            values = copy.deepcopy(before.values)
            if settings.get("model_name_or_path", before.model) != before.model:
                values.pop("model_revision", None)
            for dotted, value in settings.items():
                *groups, name = dotted.split("__")
                group = functools.reduce(lambda outer, key: outer.setdefault(key, {}), groups, values)
                if value is None:
                    group.pop(name, None)
                else:
                    group[name] = value
            return self._store(values)

    def apply(self, override: str) -> DraftState:
        """Set `key=value key=value`, shell-quoted."""
        overrides = shlex.split(override)
        changed = {assignment.partition("=")[0].strip().split(".")[0] for assignment in overrides}
        with self._lock:
            before = self.read()
            recipe = parse_recipe(write_recipe(before.recipe), "recipe", overrides).model_dump(exclude_unset=True, mode="json")
            stand_ins = {*_STAND_INS, "gpu"} - {*before.values, *changed}
            values = {name: value for name, value in recipe.items() if name not in stand_ins}
            return self._store(values)

    def write(self, text: str, keep: Sequence[str] = (), *, is_typed: bool = False) -> DraftState:
        """Replace the settings by a recipe, except chosen settings in `keep`."""
        with self._lock:
            before = self.read()
            values = parse_recipe(text, "recipe").model_dump(exclude_unset=True, mode="json")
            if not is_typed:
                values.pop("output_dir", None)  # the folder of the run whose recipe this is
            values |= {name: before.values[name] for name in keep if name in before.values}
            return self._store(values)

    def clear(self) -> DraftState:
        return self._store({})

    def _store(self, values: dict[str, Any]) -> DraftState:
        with self._lock:
            before = self.read()
            after = _checked(values, before.stamp + 1)
            if after.values == before.values:
                return before
            write_json(self._path, {"values": after.values, "stamp": after.stamp})
            return after


def _checked(values: dict[str, Any], stamp: int) -> DraftState:
    dataset = {**_STAND_INS["dataset"], **(values.get("dataset") or {})}  # type: ignore[dict-item]
    default_gpu = {} if usable_devices() else {"gpu": "cpu"}
    recipe = recipe_from({**_STAND_INS, **default_gpu, **values, "dataset": dataset})
    if recipe.trust_remote_code:
        raise RecipeError(
            "trust_remote_code: the page does not run a model's own code",
            "Allow it on the command line: finetune run RECIPE.yaml",
        )
    return DraftState(values, recipe, stamp)


def as_text(value: Any) -> str:
    """Return a setting's value as a person types it."""
    if value is None:
        return "null"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True)
class Model:
    """A base model."""

    name: str
    #: Where the model is listed, as a text for `tr`; may contain `{recipe}`.
    source: str
    #: Size and licence on the hub; None: unknown.
    parameters: int | None = None
    licence: str | None = None
    recipe: str = ""


def local_models(workspace: Workspace) -> list[Model]:
    """Return bundled, local and downloaded models, then the shipped recipes'."""
    models = [Model(name, mark("bundled")) for name in ("tiny", "tiny-vision")]
    configs = [path for pattern in ("*/config.json", "models/*/config.json") for path in sorted(workspace.root.glob(pattern))]
    folders = [config.parent for config in configs if any(config.parent.glob("*.safetensors"))]
    models += [Model(folder.relative_to(workspace.root).as_posix(), mark("folder")) for folder in folders]
    models += [Model(name, mark("downloaded")) for name in _downloaded_models()]
    for recipe in shipped_recipes():
        models.append(Model(load_recipe(recipe).model_name_or_path, mark("recipe {recipe}"), recipe=recipe))
    names = [model.name for model in models]
    # a model that is listed twice: the first source
    return [model for index, model in enumerate(models) if model.name not in names[:index]]


def local_datasets(workspace: Workspace) -> list[str]:
    """Return bundled datasets, local files and uploads."""
    datasets = ["support", "support-pairs", "parcels"]
    for folder in (workspace.root, workspace.root / "data", workspace.folder("uploads")):
        if folder.is_dir():
            files = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in DATA_ENDINGS and path.is_file()]
            datasets += map(workspace.path_in_recipe, files[:_FILES_PER_FOLDER])
    return datasets


def search_models(query: str) -> list[Model]:
    """Search the hub for text-generation models, most downloaded first. Raises RecipeError."""
    import httpx
    from huggingface_hub import HfApi

    filters: dict[str, Any] = {"search": query[:100], "pipeline_tag": "text-generation", "limit": _MOST_FOUND}
    try:
        infos = list(HfApi().list_models(**filters, sort="downloads", expand=["safetensors", "cardData", "downloads"]))
    except (httpx.HTTPError, OSError) as error:
        raise RecipeError(
            f"the hub can't be reached: {type(error).__name__}", "Choose a local model, or give the path of a model folder."
        ) from None
    models = []
    for info in infos:
        licence = (info.card_data.to_dict() if info.card_data else {}).get("license")
        size = info.safetensors.total if info.safetensors else None
        models.append(Model(info.id, mark("hub"), size, str(licence) if licence else None))
    return models


def card_label(name: str) -> str:
    """Return `RTX 3080 Laptop` for `rtx-3080-laptop-8gb`."""
    special_cases = {"ti": "Ti", "laptop": "Laptop", "ada": "Ada", "pcie": "PCIe", "quadro": "Quadro", "titan": "Titan"}
    parts = [part for part in name.split("-") if not part.endswith("gb")]
    return " ".join(special_cases.get(part, part.upper()) for part in parts)


def _downloaded_models() -> list[str]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    with contextlib.suppress(CacheNotFound):
        return sorted(repository.repo_id for repository in scan_cache_dir().repos if repository.repo_type == "model")
    return []
