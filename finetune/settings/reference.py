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
        parts = _alternatives(schemas[name])
        choices = _choices(parts)
        type_name = _joined(choices) if choices else " | ".join(map(_type_name, parts))
        rows.append(Setting(
            name=prefix + name, type=f"{type_name} | auto" if field.default == AUTO or takes_auto(field) else type_name,
            default="required" if field.is_required() else field.default, choices=choices,
            aliases=[alias for alias, canonical in ALIASES.items() if canonical == name and not prefix],
            description=field.description or "", **row,
        ))  # fmt: skip
    return rows


def _alternatives(schema: dict[str, Any]) -> list[dict[str, Any]]:
    return [part for inner in schema["anyOf"] for part in _alternatives(inner)] if "anyOf" in schema else [schema]


def _choices(parts: list[dict[str, Any]]) -> list[Any]:
    # a plain switch, and several values at a time, are no choice
    if not any("enum" in part for part in parts):
        return []
    return [choice for part in parts for choice in part.get("enum", [False, True] if part.get("type") == "boolean" else [])]


def _type_name(part: dict[str, Any]) -> str:
    choices = part.get("items", {}).get("enum")
    return f"list of {_joined(choices)}" if choices else _TYPE_NAMES[part["type"]]


def _joined(choices: list[Any]) -> str:
    return " | ".join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices)
