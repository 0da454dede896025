"""Every setting with type, default and help, for `finetune recipes keys`, the docs and the form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from finetune.settings.schema import ALIASES, AUTO, Recipe, takes_auto


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
    for name, field in model.model_fields.items():
        annotation = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            rows += settings_reference(annotation, f"{prefix}{name}.")
            continue
        row: Any = field.json_schema_extra
        rows.append(
            Setting(
                name=prefix + name,
                type=type_name(annotation, auto=field.default == AUTO or takes_auto(field)),
                default="required" if field.is_required() else field.default,
                choices=choices(annotation),
                aliases=[alias for alias, canonical in ALIASES.items() if canonical == name and not prefix],
                description=field.description or "",
                **row,
            )  # fmt: skip
        )
    return rows


def type_name(annotation: Any, auto: bool = False) -> str:
    """Return a readable type, e.g. `whole number | auto`."""
    names = {
        str: "text", int: "whole number", float: "number", bool: "true | false", type(None): "none", dict: "mapping",
        list: "list",
    }  # fmt: skip
    kind = get_origin(annotation) or annotation
    if get_origin(annotation) is list and get_origin(get_args(annotation)[0]) is Literal:
        name = f"list of {type_name(get_args(annotation)[0])}"
    elif choices(annotation):
        name = " | ".join(str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices(annotation))
    elif kind in names:
        name = names[kind]
    else:
        name = " | ".join(type_name(argument) for argument in get_args(annotation) if not _is_metadata(argument)) or "value"
    return f"{name} | auto" if auto else name


def choices(annotation: Any) -> list[Any]:
    """Return the allowed values if the type enumerates them."""
    # several values at a time, so not a choice
    if get_origin(annotation) in (list, dict):
        return []
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    values: list[Any] = []
    for part in get_args(annotation):
        if part is bool:
            values += [False, True]
        elif get_origin(part) is Literal:
            values += choices(part)
        elif part is not type(None) and not _is_metadata(part):
            return []
    return values


def _is_metadata(argument: Any) -> bool:
    return not (isinstance(argument, type) or get_origin(argument) is not None)
