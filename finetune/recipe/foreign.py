"""Configurations of LLaMA-Factory, Axolotl and TRL as recipes."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml as pyyaml

from finetune.errors import RecipeError
from finetune.recipe import NO_DATASET, apply_override, read_text, secret_in, validate, yaml
from finetune.recipe.yaml import Values
from finetune.settings.methods import METHODS
from finetune.settings.schema import Recipe

# Each tool has a table in `tools`, with these entries; keys without a row are listed and not carried over:
#
# keys           key -> setting, or value -> settings. `else`: the setting of all other values. `fraction`: the setting of
#                values between 0 and 1. A value without a row has the key's reason below. Where two keys set one setting, the
#                later row counts.
# refused        reason -> keys that train something that finetune doesn't train
# not carried over, no effect    reason -> keys that may change the result, and keys that can't
# batch          keys whose product, times the number of processes, is the effective batch size
# defaults       the tool's values of absent keys; `fixed`: settings that the tool always has
# methods        defaults and fixed settings by method; `keys`: keys that only this method has
# notes          differences to print where a key is set, or by method; `notes on defaults`: where the default counts
TABLES = Path(__file__).parent / "tools"
Outcome = Literal["carried over", "no effect", "not carried over", "refused"]


@dataclass(frozen=True)
class Tool:
    """A tool's table, merged with the shared table."""

    name: str
    table: Values
    keys: Values
    reasons: dict[str, tuple[Outcome, str]]
    defaults: Values
    notes: dict[str, str]

    def knows(self, key: str) -> bool:
        return key in {*self.keys, *self.reasons, *self.table["batch"]} or self.has_inner(key)

    def has_inner(self, key: str) -> bool:
        return any(name.startswith(f"{key}.") for name in (*self.keys, *self.reasons))

    def meaning(self, key: str, value: Any) -> tuple[Outcome, str, Values]:
        """Return a key's outcome, the reason, and settings."""
        row = self.keys.get(key)
        # a list of one value means the value; lists of several have no setting
        item = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(row, str) and value is not None:
            return _carried({row: value})
        if isinstance(row, dict):
            is_listed = not isinstance(item, (list, dict)) and item in row
            if is_listed and row[item] is not None:
                return _carried(row[item])
            is_fraction = "fraction" in row and isinstance(item, float) and 0 < item < 1
            setting = row.get("fraction" if is_fraction else "else")
            if setting and value is not None and not is_listed:
                return _carried({setting: item})
        if value is None or (row is None and value in (False, 0, "", "none", [], {})):
            return "no effect", "is off or empty", {}
        unknown = "finetune does not know this key" if row is None else "finetune does not know this value"
        return *self.reasons.get(key, ("not carried over", unknown)), {}


def _carried(settings: Values) -> tuple[Outcome, str, Values]:
    if not settings:
        return "no effect", "needs no setting here", {}
    return "carried over", ", ".join(f"{setting}: {short(value)}" for setting, value in settings.items()), settings


@functools.cache
def tools() -> tuple[Tool, ...]:
    """Read the tables."""
    shared, *tables = (
        pyyaml.safe_load((TABLES / f"{name}.yaml").read_text(encoding="utf-8"))
        for name in ("training-arguments", "llama-factory", "axolotl", "trl")
    )
    outcomes: tuple[Outcome, ...] = ("refused", "not carried over", "no effect")
    merged = []
    for table in tables:
        reasons: dict[str, tuple[Outcome, str]] = {}
        for source, outcome in itertools.product((shared, table), outcomes):
            for reason, listed_keys in source.get(outcome, {}).items():
                reasons |= dict.fromkeys(listed_keys.split(), (outcome, reason))
        keys = shared["keys"] | table["keys"]
        # also by the setting's name: Axolotl's num_epochs replaces the shared default of num_train_epochs
        replaced = [*table["defaults"], *map(keys.get, table["defaults"])]
        inherited = {key: value for key, value in shared["defaults"].items() if key not in replaced}
        notes = shared["notes"] | table["notes"]
        merged.append(Tool(table["name"], table, keys, reasons, table["defaults"] | inherited, notes))
    return tuple(merged)


@dataclass
class KeyReport:
    """Outcome of a key in the file."""

    key: str
    value: str
    line: int | None
    outcome: Outcome
    text: str


@dataclass
class Conversion:
    """Outcomes, settings and notes of a converted file."""

    tool: Tool
    keys: dict[str, KeyReport] = field(default_factory=dict)
    settings: Values = field(default_factory=dict)
    key_of: dict[str, str] = field(default_factory=dict)  # setting -> the key that set it
    #: Settings from the tool's defaults.
    assumed: Values = field(default_factory=dict)
    #: Differences that no key shows.
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def report(self, key: str, outcome: Outcome, text: str) -> None:
        self.keys[key].outcome, self.keys[key].text = outcome, text

    def with_outcome(self, outcome: Outcome) -> list[KeyReport]:
        return sorted((key for key in self.keys.values() if key.outcome == outcome), key=lambda key: key.line or 0)


def tool_of(values: Values, name: str) -> Tool:
    """Return a configuration's tool. Raises RecipeError for other files."""
    marked = [tool for tool in tools() if not values.keys().isdisjoint(tool.table["markers"].split())]
    if marked:
        return max(marked, key=lambda tool: sum(tool.knows(key) for key in values))
    trl = tools()[-1]
    if all(map(trl.knows, values)):  # a TRL file may lack every marker
        return trl
    readable = ", ".join(tool.name for tool in tools())
    raise RecipeError(f"{name} is not a configuration of {readable}, which `finetune convert` reads")


def convert_file(source: str, overrides: Sequence[str] = ()) -> tuple[Recipe, Conversion]:
    """Convert a file. Raises RecipeError with all problems."""
    return convert_text(read_text(Path(source)), source, overrides)


def convert_text(text: str, name: str, overrides: Sequence[str] = ()) -> tuple[Recipe, Conversion]:
    """Convert a text; `name` prefixes each problem."""
    document = yaml.parse(text, name, yaml.OtherToolsLoader)
    tool = tool_of(document.values, name)
    override_values: Values = {}
    for override in overrides:
        apply_override(override, override_values, {})
    conversion = Conversion(tool, problems=list(document.problems))
    for key, value in document.values.items():
        if secret := secret_in(key, value):
            reason = f"secrets don't belong in a file: `hf auth login`, or set HF_TOKEN; remove '{secret}'"
        elif "${" in str(value):
            reason = f"{key} has ${{...}}, which finetune does not expand; write the value out"
        else:
            continue
        conversion.problems.append(f"{name}:{document.lines[key]}: {reason}")
    values = _flat(tool, document.values)
    for key, value in values.items():
        line = document.lines.get(key, document.lines.get(key.partition(".")[0]))
        conversion.keys[key] = KeyReport(key, short(value), line, "no effect", "")
    _read_keys(conversion, values)
    # overrides decide the batch and the method, whose defaults differ
    launch, method = override_values.get("launch"), override_values.get("method")
    processes = launch.get("num_processes", 1) if isinstance(launch, dict) else 1
    _read_batch(conversion, values, processes if type(processes) is int else 1)
    method = _read_method(conversion, values, method if isinstance(method, str) else None)
    _add_defaults(conversion, values, method, name)
    for report in conversion.with_outcome("refused"):
        conversion.problems.append(f"{name}:{report.line}: {report.key} {report.value}: {report.text}")
    conversion.settings.setdefault("dataset.path", NO_DATASET)
    recipe = _validate_conversion(conversion, overrides, name)
    if recipe.dataset.path == NO_DATASET:
        conversion.notes.append("the recipe has no dataset: set dataset.path=FILE or a hub dataset's id")
    return recipe, conversion


def _flat(tool: Tool, values: Values) -> Values:
    flat: Values = {}
    for key, value in values.items():
        section = value[0] if isinstance(value, list) and len(value) == 1 else value
        if isinstance(section, dict) and tool.has_inner(key):
            flat |= {f"{key}.{name}": item for name, item in section.items()}
        else:
            flat[key] = value
    return flat


def _read_keys(conversion: Conversion, values: Values) -> None:
    tool = conversion.tool
    # in the table's order: if two keys set the same setting, the later row wins
    order = [*tool.keys]
    for key in sorted(values, key=lambda key: order.index(key) if key in order else -1):
        outcome, text, settings = tool.meaning(key, values[key])
        conversion.report(key, outcome, text)
        for setting, value in settings.items():
            if conversion.settings.get(setting, value) != value:
                conversion.report(conversion.key_of[setting], "not carried over", f"{key} takes precedence")
            conversion.settings[setting], conversion.key_of[setting] = value, key


def _read_batch(conversion: Conversion, values: Values, processes: int) -> None:
    keys = conversion.tool.table["batch"]
    factors = [values[key] if values.get(key) is not None else conversion.tool.defaults[key] for key in keys]
    invalid = [key for key, factor in zip(keys, factors, strict=True) if type(factor) is not int or factor < 1]
    for key in invalid:
        conversion.report(key, "refused", "is not a whole number above 0")
    if invalid:
        return
    size = conversion.settings["effective_batch_size"] = math.prod(factors) * processes
    product = " x ".join(map(str, [*factors, processes]))
    for key in values.keys() & set(keys):
        conversion.report(key, "carried over", f"effective_batch_size: {product} = {size}")
        conversion.key_of["effective_batch_size"] = key
    if values.keys().isdisjoint(keys):
        conversion.assumed["effective_batch_size"] = size


def _read_method(conversion: Conversion, values: Values, chosen: str | None) -> str:
    # an override, else the tool's key for the method, else a key that only one method has
    rows, settings = conversion.tool.table["methods"], conversion.settings
    by_key = (name for name, row in rows.items() if not values.keys().isdisjoint(row.get("keys", "").split()))
    method = chosen or settings.get("method") or next(by_key, "sft")
    if method != "sft":
        settings["method"] = method
    # a recipe refuses settings of other methods, tools ignore them
    unused = {setting for other in METHODS.values() for setting in other.settings}
    unused -= {*METHODS.get(method, METHODS["sft"]).settings}
    for setting in unused & settings.keys():
        del settings[setting]
        conversion.report(conversion.key_of.pop(setting), "no effect", f"method {method} has no {setting}")
    return str(method)


def _add_defaults(conversion: Conversion, values: Values, method: str, name: str) -> None:
    tool, settings = conversion.tool, conversion.settings
    method_row = tool.table["methods"].get(method, {})
    set_keys = [key for key, value in values.items() if value]
    notes = [tool.notes.get(key) for key in (method, *set_keys)]
    for key, default in (tool.defaults | method_row.get("defaults", {})).items():
        if isinstance(default, dict):  # a multiple of another key, such as lora_alpha = 2 x lora_rank
            factor = values.get(default["of"])
            default = default["times"] * (factor if isinstance(factor, int) else tool.defaults[default["of"]])
        outcome, reason, meant = tool.meaning(key, default)
        new = {setting: value for setting, value in meant.items() if setting != "method"}
        is_set = values.get(key) is not None or not settings.keys().isdisjoint(new)
        if is_set or key in tool.table["batch"] or ("warmup_ratio" in new and "warmup_steps" in settings):
            continue
        if outcome == "refused":
            conversion.problems.append(f"{name}: {key} is not set: {reason}")
        conversion.assumed |= new
        settings |= new
        notes.append(tool.table.get("notes on defaults", {}).get(key))
    for setting, value in (tool.table.get("fixed", {}) | method_row.get("fixed", {})).items():
        if settings.get(setting, value) != value and setting in conversion.key_of:
            conversion.report(conversion.key_of[setting], "not carried over", f"{tool.name} has {setting} {value} in {method}")
        settings[setting] = conversion.assumed[setting] = value
    conversion.notes += [note for note in notes if note]


def _validate_conversion(conversion: Conversion, overrides: Sequence[str], name: str) -> Recipe:
    nested: Values = {}
    for setting, value in conversion.settings.items():
        *sections, leaf = setting.split(".")
        target = nested
        for section in sections:
            target = target.setdefault(section, {})
        target[leaf] = value
    locations = {setting: f"{name}:{conversion.keys[key].line}" for setting, key in conversion.key_of.items()}
    for override in overrides:
        apply_override(override, nested, locations)
    return validate(nested, locations, name, conversion.problems)


def short(value: Any) -> str:
    """Return a value as text of at most 60 characters."""
    text = str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
