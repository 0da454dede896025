"""Values as JSON and back, by their types: the one reader and writer of plan.json's and events.jsonl's dataclasses.

JSON has no NaN or infinity: they are written as text, so that nobody takes them for numbers, and read back as numbers where a
float belongs.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path, PurePath
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """`value` as dicts, lists, text and numbers: dataclasses, pydantic models, tuples, lists, sets, dicts and paths, at any
    depth."""
    if isinstance(value, float):
        return value if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, dict):
        return {key: to_json(part) for key, part in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [to_json(part) for part in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, BaseModel):
        return to_json(value.model_dump(mode="json"))
    return str(value) if isinstance(value, PurePath) else value


def from_json(cls: type[T], values: Any) -> T:
    """What `to_json` made of a `cls`, which may be a dataclass or any type hint: nested dataclasses, tuples, Optional, Literal.

    Keys that `cls` hasn't are left out, and fields without a key keep their default. Raises ValueError, which names every field
    that is missing or of another type.
    """
    try:
        return _adapter(cls).validate_python(values)
    except ValidationError as error:
        raise ValueError("; ".join(_text(fault) for fault in error.errors(include_url=False, include_context=False))) from None


def read_own(path: Path, cls: type[T], key: str = "") -> T | None:
    """Read a `cls` from a JSON file of this program, whole or as the value of `key`; None if the file is missing or damaged."""
    from finetune.files import read_object  # here: events and all above them need this module, and no files

    values = read_object(path)
    try:
        return None if values is None else from_json(cls, values.get(key) if key else values)
    except ValueError:
        return None


def readable(cls: type[T], text: bytes) -> T | None:
    """A dataclass from a line of JSON that may be damaged: a field of another type keeps its default.

    None when the line is no JSON object, or lacks required fields.
    """
    try:
        return _adapter(cls).validate_json(text)
    except ValidationError as error:
        wrong = {fault["loc"][0] for fault in error.errors(include_url=False, include_context=False) if fault["loc"]}
    try:
        values = json.loads(text)
        return _adapter(cls).validate_python({name: value for name, value in values.items() if name not in wrong})
    except (ValueError, AttributeError, RecursionError):  # ValueError: pydantic's and json's
        return None


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(cls: Any) -> TypeAdapter[Any]:
    if cls not in _adapters:  # making one takes about a millisecond
        _adapters[cls] = TypeAdapter(cls)
    return _adapters[cls]


def _text(fault: Any) -> str:
    location = ".".join(str(part) for part in fault["loc"])
    return f"{location}: {fault['msg']}" if location else fault["msg"]
