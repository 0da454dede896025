"""Draft: the recipe of the next run."""

from __future__ import annotations

import contextlib
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

#: Recipe of the demo: bundled model and data, trains on any machine.
FIRST = "tiny-cpu"
#: Stand-ins for missing choices, so that the draft can be checked and planned.
_NOT_CHOSEN = {"model_name_or_path": "tiny", "dataset": {"path": "support"}}
#: Settings kept for another model, although nobody typed them.
_KEPT = ("dataset", "gpu", "price_per_hour", "memory_budget")
_UNDOABLE = 50


@dataclass(frozen=True)
class Edited:
    """The draft."""

    values: dict[str, Any]
    #: Names of typed settings.
    typed: tuple[str, ...]
    #: With stand-ins for missing choices.
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
        return write_recipe(self.recipe) if self.is_complete else dump(self.values) if self.values else ""


class Draft:
    """Reads and changes the draft. Invalid changes raise RecipeError."""

    def __init__(self, workspace: Workspace) -> None:
        # a file: every tab and restart shows the same draft
        self._path, self._lock = workspace.folder("draft") / "draft.json", threading.RLock()
        self._earlier: list[dict[str, Any]] = []

    def read(self) -> Edited:
        stored = read_object(self._path) or {}
        # another version's settings may be invalid
        with contextlib.suppress(RecipeError, TypeError, ValueError):
            return _edited(stored.get("values") or {}, stored.get("typed") or (), int(stored.get("stamp") or 0))
        return _edited({}, (), 0)

    def change(self, **settings: Any) -> Edited:
        """Set settings by dotted name, with `__` for the dot; None unsets."""
        with self._lock:
            now = self.read()
            values, typed = json.loads(json.dumps(now.values)), {*now.typed}
            if settings.get("model_name_or_path", now.model) != now.model:
                # another model drops what nobody typed: it was chosen for the old model
                values = {name: value for name, value in values.items() if name in typed or name in _KEPT}
                values.pop("model_revision", None)
            for dotted, value in settings.items():
                *groups, name = dotted.split("__")
                group = functools.reduce(lambda outer, key: outer.setdefault(key, {}), groups, values)
                if value is None:
                    group.pop(name, None)
                else:
                    group[name] = value
                (typed.discard if value is None else typed.add)(dotted.partition("__")[0])
            return self._store(values, typed)

    def apply(self, override: str) -> Edited:
        overrides = shlex.split(override)
        changed = {part.partition("=")[0].strip().split(".")[0] for part in overrides}
        with self._lock:
            now = self.read()
            recipe = parse_recipe(write_recipe(now.recipe), "recipe", overrides)
            stand_ins = {*_NOT_CHOSEN, "gpu"} - {*now.values, *changed}
            return self._store(
                {name: value for name, value in _values(recipe).items() if name not in stand_ins}, changed.union(now.typed)
            )

    def write(self, text: str, keep: Sequence[str] = (), *, is_typed: bool = False) -> Edited:
        """Replace the settings by a recipe, except chosen settings in `keep`."""
        with self._lock:
            now = self.read()
            values = _values(parse_recipe(text, "recipe"))
            if not is_typed:
                values.pop("output_dir", None)  # the copied run's folder
            values |= {name: now.values[name] for name in keep if name in now.values}
            return self._store(values, values if is_typed else ())

    def clear(self) -> Edited:
        return self._store({}, ())

    def undo(self) -> Edited:
        with self._lock:
            if self._earlier:
                stored = {**self._earlier.pop(), "stamp": self.read().stamp + 1}
                write_json(self._path, stored)
            return self.read()

    @property
    def can_undo(self) -> bool:
        return bool(self._earlier)

    def _store(self, values: dict[str, Any], typed: Any) -> Edited:
        with self._lock:
            now = self.read()
            edited = _edited(values, typed, now.stamp + 1)
            if edited.values == now.values:
                return now
            write_json(self._path, {"values": edited.values, "typed": edited.typed, "stamp": edited.stamp})
            self._earlier = [*self._earlier[1 - _UNDOABLE :], {"values": now.values, "typed": now.typed}]
            return edited


def _edited(values: dict[str, Any], typed: Any, stamp: int) -> Edited:
    dataset = {**_NOT_CHOSEN["dataset"], **(values.get("dataset") or {})}  # type: ignore[dict-item]
    here = {} if usable_devices() else {"gpu": "cpu"}  # without a GPU the default is the CPU
    recipe = recipe_from({**_NOT_CHOSEN, **here, **values, "dataset": dataset})
    if recipe.trust_remote_code:
        raise RecipeError(
            "trust_remote_code: the page does not run a model's own code",
            "Allow it on the command line: finetune run RECIPE.yaml",
        )
    return Edited(values, tuple(sorted(typed)), recipe, stamp)


def _values(recipe: Recipe) -> dict[str, Any]:
    return recipe.model_dump(exclude_unset=True, mode="json")


def as_text(value: Any) -> str:
    """Return a setting's value as typed."""
    if value is None:
        return "null"
    if isinstance(value, (dict, list)):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower() if isinstance(value, bool) else str(value)
