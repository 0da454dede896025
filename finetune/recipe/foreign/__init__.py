"""Configurations of other tools as recipes: each key is carried over, has no effect here, or is refused with the reason.

A tool is a table of its keys (`rules.Tool`). Facts about a key are data in the tables; code is only where keys mean something
together, as micro-batch and accumulation do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError
from finetune.recipe.foreign import axolotl, llama_factory, mlx_lm, torchtune, trl, unsloth
from finetune.recipe.foreign.rules import Entry, Ignore, Keep, Reading, Refuse, Tool

__all__ = ["TOOLS", "Conversion", "Entry", "Tool", "convert", "meaning_elsewhere", "tool_of"]

TOOLS: tuple[Tool, ...] = (llama_factory.TOOL, axolotl.TOOL, torchtune.TOOL, unsloth.TOOL, mlx_lm.TOOL, trl.TOOL)


@dataclass(frozen=True)
class Conversion:
    """A configuration read as a recipe: the settings, the file's key behind each, every key's entry, the tool's defaults."""

    tool: str
    values: dict[str, Any]  # nested, as a recipe's
    origin: dict[str, str]  # our dotted setting -> file:line
    entries: tuple[Entry, ...]
    assumed: dict[str, Any]

    @property
    def notes(self) -> list[str]:
        """What is carried over but not quite the same."""
        return [f"{entry.key}: {entry.note}" for entry in self.entries if entry.note]

    def problems(self, name: str) -> list[str]:
        """The refused keys, each with its line."""
        return [f"{_place(name, entry.line)}: {entry.key} {entry.text}" for entry in self.entries if entry.outcome == "refused"]

    def counted(self) -> str:
        """How many keys were carried over and how many have no effect."""
        counts = {outcome: sum(entry.outcome == outcome for entry in self.entries) for outcome in ("carried over", "no effect")}
        return f"{counts['carried over']} keys carried over, {counts['no effect']} without effect here"


def tool_of(values: dict[str, Any]) -> Tool | None:
    """The tool whose configuration this is, None for a recipe."""
    found = []
    for tool in TOOLS:
        flat = _flat(values) if tool.nested else values
        if any(_has(flat, marker) for marker in tool.markers):
            found.append((sum(tool.rule(key) is not None for key in flat) / max(1, len(flat)), tool.name, tool))
    return max(found)[2] if found else None


def convert(
    tool: Tool, values: dict[str, Any], lines: dict[str, int], name: str, folder: Path, given: dict[str, Any], ours: set[str]
) -> Conversion:
    """`values` of `tool` as a recipe's. `lines` of the keys and `folder` are the file's; `given` the user's overrides."""
    flat = _flat(values) if tool.nested else values
    reading = Reading(tool, {key: value for key, value in flat.items() if value is not None}, lines, folder, given)
    for key in reading.values:
        if tool.rule(key) is None and key in ours and key.partition(".")[0] in ours:
            reading.keep(key, key, reading.values[key])
        else:
            reading.apply(key)
    try:
        tool.finish(reading)
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # a list where the tool has a number, and the like
        raise RecipeError(f"{name}: a value is not of the kind that {tool.name} has: {error}") from None
    for key in [key for key in reading.values if key not in reading.entries]:
        reading.refuse(key, "is not understood beside the other keys")
    for setting, value in tool.defaults.items():
        if not (setting == "warmup_ratio" and "warmup_steps" in reading.settings):
            reading.assume(setting, value)
    for key, value in flat.items():
        if value is None:
            reading.ignore_empty(key)
    order = sorted(reading.entries.values(), key=lambda entry: entry.line or 0)
    origin = {setting: _place(name, reading.line_of(key)) for setting, key in reading.origin.items()}
    return Conversion(tool.name, _nested(reading.settings), origin, tuple(order), reading.assumed)


def meaning_elsewhere(key: str) -> str | None:
    """What a key that a recipe doesn't have means in another tool: our setting, or why there is none. None when unknown."""
    for tool in TOOLS:
        match tool.keys.get(key):
            case Keep(setting):
                return f"that is {tool.name}'s name for '{setting}'"
            case Ignore(why):
                return f"{tool.name}'s, without effect here: {why}"
            case Refuse(why):
                return f"{tool.name}'s: {why}"
    return _TOGETHER.get(key)


#: Keys that a tool reads together with others -> what to use here.
_TOGETHER = {
    "val_size": "that is LLaMA-Factory's name for 'dataset.test_split_size'",
    "val_set_size": "that is Axolotl's name for 'dataset.test_split_size'",
    "max_samples": "that is LLaMA-Factory's name for 'dataset.max_rows'",
    "template": "that is LLaMA-Factory's name for 'chat_template'",
    "quantization_bit": "use load_in_4bit or load_in_8bit", "datasets": "use dataset: {path: ...}",
    "dataset_name": "use dataset: {path: ...}",
    "lora_target_linear": "use target_modules: all-linear",
}  # fmt: skip


def _has(flat: dict[str, Any], marker: str) -> bool:
    return marker in flat or (marker.startswith("*") and any(key.endswith(marker[1:]) for key in flat))


def _place(name: str, line: int | None) -> str:
    return f"{name}:{line}" if line else name


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, inner = name.partition(".")
        if inner:
            nested.setdefault(section, {})[inner] = value
        else:
            nested[name] = value
    return nested
