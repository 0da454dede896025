"""Draft: the recipe of the next run."""

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
from finetune.errors import RecipeError
from finetune.files import read_object, write_json
from finetune.recipe import parse_recipe, recipe_from, write_recipe
from finetune.recipe.yaml import dump
from finetune.settings import Recipe

from ..workspace import Workspace

DEMO_RECIPE = "tiny-cpu"  # bundled model and data, trains on any machine
#: Stand-ins for missing choices, so that the draft can be checked and planned.
_STAND_INS = {"model_name_or_path": "tiny", "dataset": {"path": "support"}}


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
