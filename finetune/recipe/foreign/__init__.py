"""Configurations of other tools as recipes: each key is carried over, has no effect here, or is refused with the reason.

A tool is a table of its keys (`rules.Tool`). Facts about a key are data in the tables; code is only where keys mean something
together, as micro-batch and accumulation do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import RecipeError
from finetune.recipe import load, yaml
from finetune.recipe.foreign import axolotl, llama_factory, trl
from finetune.recipe.foreign.rules import ConfigReader, Ignore, Keep, KeyReport, Refuse, Tool
from finetune.settings.schema import Recipe

__all__ = [
    "TOOLS",
    "Conversion",
    "KeyReport",
    "Tool",
    "convert",
    "convert_file",
    "convert_text",
    "hint_for_key",
    "tool_of",
    "unread_tool",
]

TOOLS: tuple[Tool, ...] = (llama_factory.TOOL, axolotl.TOOL, trl.TOOL)
#: Tools that `finetune convert` does not read, each with keys that only their files have; dots are nesting.
_UNREAD = {
    "LLaMA-Factory v1": "peft_config dist_config", "torchtune": "dataset._component_ tokenizer._component_ model._component_",
    "Unsloth Studio": "training.max_seq_length lora.lora_r", "mlx-lm": "fine_tune_type lora_parameters",
    "LitGPT": "train.max_seq_length train.global_batch_size", "Oumi": "model.model_name", "AutoTrain": "project_name",
    "ms-swift": "tuner_type rlhf_type", "SkyPilot": "resources", "DeepSpeed": "zero_optimization",
}  # fmt: skip


@dataclass(frozen=True)
class Conversion:
    """A configuration read as a recipe: the settings, the file's key behind each, every key's entry, the tool's defaults."""

    tool: str
    values: dict[str, Any]  # nested, as a recipe's
    locations: dict[str, str]  # our dotted setting -> file:line
    entries: tuple[KeyReport, ...]
    assumed: dict[str, Any]
    remarks: tuple[str, ...] = ()  # differences that no key of the file has

    @property
    def notes(self) -> list[str]:
        """The differences: in keys that are carried over, and where keys are absent."""
        return [*(f"{entry.key}: {entry.note}" for entry in self.entries if entry.note), *self.remarks]

    def problems(self, name: str) -> list[str]:
        """The refused keys, each with its line."""
        refused = [entry for entry in self.entries if entry.outcome == "refused"]
        return [f"{_location(name, entry.line)}: {entry.key} {entry.text}" for entry in refused]

    def summary(self) -> str:
        """How many keys were carried over and how many have no effect."""
        counts = {outcome: sum(entry.outcome == outcome for entry in self.entries) for outcome in ("carried over", "no effect")}
        return f"{counts['carried over']} keys carried over, {counts['no effect']} without effect here"


def tool_of(values: dict[str, Any]) -> Tool | None:
    """The tool whose configuration this is, None for a recipe."""
    matches = [
        (sum(tool.rule(key) is not None for key in values) / max(1, len(values)), tool.name, tool)
        for tool in TOOLS
        if any(marker in values for marker in tool.markers.split())
    ]
    if matches:
        return max(matches)[2]
    return trl.TOOL if trl.has_only_its_keys(values) else None


def unread_tool(values: dict[str, Any]) -> str | None:
    """The name of the tool whose file this is, if `finetune convert` does not read it."""
    keys = {*values, *_flat(values)}
    return next((name for name, markers in _UNREAD.items() if keys & set(markers.split())), None)


def convert_file(source: str, overrides: list[str]) -> tuple[Recipe, Conversion]:
    """Another tool's configuration as a recipe. Raises RecipeError with all problems."""
    path = Path(source)
    return convert_text(load.read_text(path), source, overrides, path.parent)


def convert_text(
    text: str, name: str, overrides: list[str] | tuple[str, ...] = (), folder: Path = Path()
) -> tuple[Recipe, Conversion]:
    """The same from the text; `folder` is where the file is, for other files that it names."""
    document = yaml.parse(text, name, yaml_1_1=True)  # as other tools read it
    tool = tool_of(document.values)
    if unread := unread_tool(document.values):
        raise RecipeError(f"{name} is a configuration of {unread}, which finetune does not read")
    if tool is None:
        tools = ", ".join(tool.name for tool in TOOLS)
        raise RecipeError(f"{name} is not a configuration of {tools}, which `finetune convert` reads")
    if key := next((key for key, value in document.values.items() if load.holds_secret(value)), None):
        raise RecipeError(f"{name}:{document.lines[key]}: secrets don't belong in a file; remove '{key}'")
    overridden: dict[str, Any] = {}
    for override in overrides:
        load.apply_override(override, overridden, {})
    conversion = convert(tool, document.values, document.lines, name, folder, _flat(overridden), set(Recipe.model_fields))
    values, locations = conversion.values, dict(conversion.locations)
    for override in overrides:
        load.apply_override(override, values, locations)
    return load.validated(values, locations, name, [*document.problems, *conversion.problems(name)]), conversion


def convert(
    tool: Tool, values: dict[str, Any], lines: dict[str, int], name: str, folder: Path, overrides: dict[str, Any],
    our_keys: set[str],
) -> Conversion:  # fmt: skip
    """`values` of `tool` as a recipe's. `lines` of the keys and `folder` are the file's; `overrides` the user's overrides."""
    flat, references = values, set()
    if tool.interpolates:
        references = {key for value in flat.values() if isinstance(value, str) for key in _REFERENCE.findall(value)}
        flat = _interpolated(flat, _flat(values), name, lines)
    config = ConfigReader(tool, {key: value for key, value in flat.items() if value is not None}, lines, folder, overrides)
    for key in config.values:
        if tool.rule(key) is None and key in our_keys and key.partition(".")[0] in our_keys:
            config.keep(key, key, config.values[key])
        elif tool.rule(key) is None and key in references:
            config.ignore(key, f"is read where ${{{key}}} stands")
        else:
            config.apply(key)
    try:
        tool.finish(config)
    except (TypeError, ValueError, AttributeError, KeyError) as error:  # a list where the tool has a number, and the like
        raise RecipeError(f"{name}: a value is not of the kind that {tool.name} has: {error}") from None
    for key in [key for key in config.values if key not in config.entries]:
        config.refuse(key, "is not understood beside the other keys")
    for setting, value in tool.defaults.items():
        other = {"warmup_ratio": "warmup_steps", "warmup_steps": "warmup_ratio"}.get(setting)
        if other not in config.settings and other not in config.overrides:
            config.assume(setting, value)
    for key, value in flat.items():
        if value is None:
            config.ignore_empty(key)
    reports = sorted(config.entries.values(), key=lambda entry: entry.line or 0)
    locations = {setting: _location(name, lines.get(key)) for setting, key in config.keys_by_setting.items()}
    return Conversion(tool.name, _nested(config.settings), locations, tuple(reports), config.assumed, tuple(config.notes))


def hint_for_key(key: str) -> str | None:
    """The meaning in another tool of a key that recipes don't have: our setting, or why there is none. None if unknown."""
    for tool in TOOLS:
        match tool.keys.get(key):
            case Keep(setting):
                return f"that is {tool.name}'s name for '{setting}'"
            case Ignore(reason):
                return f"{tool.name}'s, without effect here: {reason}"
            case Refuse(reason):
                return f"{tool.name}'s: {reason}"
    return _KEY_HINTS.get(key)


_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
#: Keys that a tool reads together with others -> what to use here.
_KEY_HINTS = {
    "val_size": "that is LLaMA-Factory's name for 'dataset.test_split_size'",
    "val_set_size": "that is Axolotl's name for 'dataset.test_split_size'",
    "max_samples": "that is LLaMA-Factory's name for 'dataset.max_rows'",
    "template": "that is LLaMA-Factory's name for 'chat_template'",
    "quantization_bit": "use load_in_4bit or load_in_8bit", "datasets": "use dataset: {path: ...}",
    "dataset_name": "use dataset: {path: ...}",
    "lora_target_linear": "use target_modules: all-linear",
}  # fmt: skip


def _location(name: str, line: int | None) -> str:
    return f"{name}:{line}" if line else name


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _interpolated(flat: dict[str, Any], dotted: dict[str, Any], name: str, lines: dict[str, int]) -> dict[str, Any]:
    """The values with `${key}` replaced by the other key's. Raises RecipeError where there is none, or a circle."""

    def value_of(key: str, text: str, depth: int = 0) -> Any:
        for reference in _REFERENCE.findall(text):
            other = dotted.get(reference)
            if other is None or depth > 5:
                location = _location(name, lines.get(key))
                raise RecipeError(f"{location}: {key} {text}: ${{{reference}}} has no value; write the value out")
            other = value_of(key, other, depth + 1) if isinstance(other, str) else other
            if text == f"${{{reference}}}":
                return other
            text = text.replace(f"${{{reference}}}", str(other))
        return text

    return {key: value_of(key, value) if isinstance(value, str) else value for key, value in flat.items()}


def _nested(settings: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        section, _, inner = name.partition(".")
        if inner:
            nested.setdefault(section, {})[inner] = value
        else:
            nested[name] = value
    return nested
