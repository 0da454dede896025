"""Dataclasses of plan.json and events.jsonl as JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Convert dataclasses, pydantic models, collections and paths to JSON values."""
    if isinstance(value, float):  # JSON has no NaN or infinity: "nan", "inf" or "-inf", which `from_json` reads as a float
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [to_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, BaseModel):
        return to_json(value.model_dump(mode="json"))
    return str(value) if isinstance(value, PurePath) else value


def from_json(cls: type[T], values: Any) -> T:
    """Read a dataclass or type hint from `to_json` values. Raises ValueError."""
    try:  # ignores unknown keys: files of later versions may have them
        return _adapter(cls).validate_python(values)
    except ValidationError as error:
        raise ValueError("; ".join(map(_message, error.errors(include_url=False, include_context=False)))) from None


def read_json_as(path: Path, cls: type[T], key: str = "") -> T | None:
    """Read a `cls` from a JSON file or its `key`; None if unreadable."""
    from finetune.files import read_object  # imported here: events needs this module, but not files

    values = read_object(path)
    try:
        return None if values is None else from_json(cls, values.get(key) if key else values)
    except ValueError:
        return None


def parse_leniently(cls: type[T], text: bytes) -> T | None:
    """Parse a JSON object without its invalid fields; None if unreadable."""
    try:
        return _adapter(cls).validate_json(text)
    except ValidationError as error:
        invalid = {fault["loc"][0] for fault in error.errors(include_url=False, include_context=False) if fault["loc"]}
    try:  # without the invalid fields, which get their defaults
        values = json.loads(text)
        return _adapter(cls).validate_python({name: value for name, value in values.items() if name not in invalid})
    except (ValueError, AttributeError, RecursionError):  # ValueError: pydantic's and json's
        return None


#: Cached: making an adapter takes about a millisecond.
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def _message(fault: Any) -> str:
    location = ".".join(str(part) for part in fault["loc"])
    return f"{location}: {fault['msg']}" if location else fault["msg"]
