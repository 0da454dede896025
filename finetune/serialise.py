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
    """Convert dataclasses, pydantic models, collections and paths to JSON."""
    if isinstance(value, float):  # JSON has no NaN or infinity: text, which `from_json` reads where a float belongs
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
    """Read a dataclass or type hint from `to_json` values. Raises ValueError."""
    try:  # ignores unknown keys: files of later versions may have them
        return _adapter(cls).validate_python(values)
    except ValidationError as error:
        raise ValueError("; ".join(_text(fault) for fault in error.errors(include_url=False, include_context=False))) from None


def read_own(path: Path, cls: type[T], key: str = "") -> T | None:
    """Read a `cls` from a JSON file, or None."""
    from finetune.files import read_object  # here: events and all above them need this module, and no files

    values = read_object(path)
    try:
        return None if values is None else from_json(cls, values.get(key) if key else values)
    except ValueError:
        return None


def readable(cls: type[T], text: bytes) -> T | None:
    """Read a dataclass from a possibly damaged line, or None."""
    try:
        return _adapter(cls).validate_json(text)
    except ValidationError as error:
        wrong = {fault["loc"][0] for fault in error.errors(include_url=False, include_context=False) if fault["loc"]}
    try:  # a field of a wrong type keeps its default
        values = json.loads(text)
        return _adapter(cls).validate_python({name: value for name, value in values.items() if name not in wrong})
    except (ValueError, AttributeError, RecursionError):  # ValueError: pydantic's and json's
        return None


#: Making an adapter takes about a millisecond.
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def _text(fault: Any) -> str:
    location = ".".join(str(part) for part in fault["loc"])
    return f"{location}: {fault['msg']}" if location else fault["msg"]
