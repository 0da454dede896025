"""Every setting with type, default and help, for `finetune recipes keys`, the docs and the form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from finetune.settings.schema import ALIASES, AUTO, Recipe, takes_auto

_TYPE_NAMES = {
    "string": "text", "integer": "whole number", "number": "number", "boolean": "true | false", "null": "none",
    "object": "mapping", "array": "list",
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A setting for display. `name` is dotted when nested; `default` may be "required"."""

    name: str
    type: str
    default: Any
    choices: list[Any]
    aliases: list[str]
    description: str
    group: str
    decides: list[str]


def settings_reference(model: type[BaseModel] = Recipe, prefix: str = "") -> list[Setting]:
    """Return a row per setting, in the schema's order."""
    rows: list[Setting] = []
    schemas = model.model_json_schema()["properties"]
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            rows += settings_reference(annotation, f"{prefix}{name}.")
            continue
        row: Any = field.json_schema_extra
        alternatives = _alternatives(schemas[name])
        choices = _choices(alternatives)
        type_name = _joined(choices) if choices else " | ".join(map(_type_name, alternatives))
        rows.append(Setting(
            name=prefix + name, type=f"{type_name} | auto" if field.default == AUTO or takes_auto(field) else type_name,
            default="required" if field.is_required() else field.default, choices=choices,
            aliases=[alias for alias, canonical in ALIASES.items() if canonical == name and not prefix],
            description=field.description or "", **row,
        ))  # fmt: skip
    return rows


def _alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    if "anyOf" not in schema:
        return [schema]
    return [alternative for inner in schema["anyOf"] for alternative in _alternatives(inner)]


def _choices(alternatives: list[dict[str, Any]]) -> list[Any]:
    # a plain switch, and several values at a time, are no choice
    if not any("enum" in schema for schema in alternatives):
        return []
    switch = {"boolean": [False, True]}
    return [choice for schema in alternatives for choice in schema.get("enum", switch.get(schema.get("type", ""), []))]


def _type_name(schema: dict[str, Any]) -> str:
    choices = schema.get("items", {}).get("enum")
    return f"list of {_joined(choices)}" if choices else _TYPE_NAMES[schema["type"]]


def _joined(choices: list[Any]) -> str:
    return " | ".join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices)
