"""The recipe that the form edits: a YAML file, so that every tab, browser and restart of the app shows the same one."""

from __future__ import annotations

import contextlib
import functools
import json
import shlex
import threading
import time
from dataclasses import dataclass
from typing import Any

from finetune.errors import RecipeError
from finetune.files import write_text
from finetune.recipe import find_recipe, load_recipe, parse_recipe, recipe_from, shipped_recipes, write_recipe
from finetune.recipe import yaml as recipe_yaml
from finetune.settings import DatasetRecipe, Recipe
from finetune.system import shell_join

from ..workspace import Workspace

#: The first draft: bundled model and data, which train on any machine.
FIRST = "tiny-cpu"
_CLOCKS_APART_S = time.time() - time.monotonic()


@dataclass(frozen=True)
class Edited:
    """The draft's text and the recipe parsed from it; the recipe is None, with problems, when it is invalid."""

    text: str
    recipe: Recipe | None
    problems: tuple[str, ...] = ()
    fix: str = ""

    @property
    def values(self) -> dict[str, Any]:
        """Settings by name; empty when the text is no valid recipe."""
        return self.recipe.model_dump(exclude_unset=True, mode="json") if self.recipe else {}


def _clock_s() -> float:
    """Never goes back: neither when the time is set while this process runs nor, for an open page, when it boots."""
    return _CLOCKS_APART_S + time.monotonic()


@dataclass(frozen=True)
class Version:
    """The draft at one moment: when it was read (see `_clock_s`), its stamp, and what it is."""

    read_s: float
    stamp: str
    edited: Edited


class Draft:
    """Reads and writes the draft file. Invalid text is kept with its problems; the form can't change it until it is valid.

    Handlers of several controls and tabs run at once: what belongs together is read in one go (`version`).
    """

    def __init__(self, workspace: Workspace) -> None:
        self._path, self._lock = workspace.folder("draft") / "recipe.yaml", threading.RLock()
        #: Stamp of the last text that was typed, and its tab.
        self._typed = ("", "")

    def version(self) -> Version:
        """The draft as it is now."""
        with self._lock:
            return Version(_clock_s(), self.stamp, self.read())

    @property
    def stamp(self) -> str:
        """Changes when the file does; each write makes a new file, as the clock of a file system is coarse."""
        try:
            stat = self._path.stat()
            return f"{stat.st_mtime_ns}-{stat.st_ino}"
        except FileNotFoundError:
            return "0"

    def read(self) -> Edited:
        """The draft; the FIRST recipe when there is none yet."""
        try:
            text = self._path.read_text(encoding="utf-8")
        except FileNotFoundError:
            text = write_recipe(load_recipe(FIRST))
        return parse_draft(text)

    def write(self, text: str) -> Edited:
        """Replace the whole text by that of a file."""
        if len(text) <= recipe_yaml.MAX_BYTES:
            self._store(text)
        return parse_draft(text)

    def type_text(self, text: str, basis: str, tab: str) -> bool:
        """Replace the text by what was typed in a tab. `basis`: the stamp of the text that was typed in.

        False, and nothing is changed, when the draft is newer than `basis` and the change was not typed in the same tab.
        """
        with self._lock:
            stamp = self.stamp
            if basis != stamp and (stamp, tab) != self._typed:
                return False
            if len(text) <= recipe_yaml.MAX_BYTES:
                self._store(text)
                self._typed = (self.stamp, tab)
            return True

    def start_from(self, name: str) -> Edited:
        """Replace the draft by a shipped recipe. Raises RecipeError when there is none of this name."""
        if name not in shipped_recipes():
            raise RecipeError(f"there is no shipped recipe {name!r}")
        return self.write(find_recipe(name).read_text(encoding="utf-8"))

    def change(self, **settings: Any) -> Edited:
        """Set (or, with None, unset) settings by dotted name written with `__`. An invalid combination changes nothing.

        `trust_remote_code` is never changed here: a click must not allow a model's own code.
        """
        with self._lock:
            now = self.read()
            if now.recipe is None:
                return now
            values = now.values
            for dotted, value in settings.items():
                if dotted != "trust_remote_code":
                    _set_nested(values, dotted.split("__"), value)
            try:
                recipe = recipe_from(values)
            except RecipeError as error:
                return Edited(now.text, now.recipe, tuple(error.problems), error.fix)
            text = write_recipe(recipe)
            if text != now.text:
                self._store(text)
            return parse_draft(text)

    def apply(self, override: str) -> Edited:
        """One `key=value` of a suggestion, by the command line's rules."""
        with self._lock:
            now = self.read()
            if now.recipe is None or override.partition("=")[0].strip() == "trust_remote_code":
                return now
            try:
                recipe = parse_recipe(now.text, "recipe", shlex.split(override))
            except RecipeError as error:
                return Edited(now.text, now.recipe, tuple(error.problems), error.fix)
            self._store(write_recipe(recipe))
            return parse_draft(write_recipe(recipe))

    def _store(self, text: str) -> None:
        with self._lock:
            write_text(self._path, text)


def parse_draft(text: str) -> Edited:
    """Parse a text as a recipe; `trust_remote_code` is refused, as a page must not run a model's own code."""
    try:
        recipe = parse_recipe(text, "recipe")
    except RecipeError as error:
        return Edited(text, None, tuple(error.problems), error.fix)
    if recipe.trust_remote_code:
        return Edited(
            text, None, ("trust_remote_code: the page does not run a model's own code",),
            "Allow it on the command line: finetune run RECIPE.yaml",
        )  # fmt: skip
    return Edited(text, recipe)


def command_line(recipe: Recipe) -> str:
    """The equivalent command: the shipped recipe that needs the fewest overrides, else a file to save first."""
    wanted = recipe.model_dump(exclude_unset=True, mode="json")
    best: list[str] | None = None
    for name, base in _shipped().items():
        with contextlib.suppress(RecipeError):
            call = [name, *_differences(base, wanted)]
            if (best is None or len(call) < len(best)) and load_recipe(name, call[1:]).model_dump() == recipe.model_dump():
                best = call
    if best is None or len(best) > 8:
        return "finetune run recipe.yaml"
    return "finetune run " + shell_join(best)


@functools.cache
def _shipped() -> dict[str, dict[str, Any]]:
    return {name: load_recipe(name).model_dump(exclude_unset=True, mode="json") for name in shipped_recipes()}


def _differences(base: dict[str, Any], wanted: dict[str, Any], prefix: str = "") -> list[str]:
    """Overrides that turn `base` into `wanted`; keys that only `base` has get the schema's default."""
    overrides = []
    for key in [*wanted, *(key for key in base if key not in wanted)]:
        if key in wanted and wanted[key] == base.get(key):
            continue
        if isinstance(wanted.get(key), dict) and isinstance(base.get(key), dict) and key != "columns":
            overrides += _differences(base[key], wanted[key], f"{prefix}{key}.")
            continue
        model: Any = DatasetRecipe if prefix == "dataset." else Recipe
        value = wanted[key] if key in wanted else model.model_fields[key].get_default(call_default_factory=True)
        overrides.append(f"{prefix}{key}={_as_text(value)}")
    return overrides


def _as_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (dict, list)):
        return json.dumps(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _set_nested(values: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        values = values.setdefault(key, {})
    if value is None:
        values.pop(path[-1], None)
    else:
        values[path[-1]] = value
