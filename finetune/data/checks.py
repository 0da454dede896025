"""Check single values of a row; a message reads as a sentence after the field's name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

Values = dict[str, Any]  # values of a row by column, or of an object in it by key
ROW_LIMIT = 4 * 2**20  # most characters of a row: about a million tokens, too long for any GPU, but tokenised in seconds
#: Names of splits, as keys of one file or values of its column `split`.
SPLITS = ("train", "test", "validation", "valid", "val", "eval", "dev")


class BadRow(Exception):  # noqa: N818 - caught where file and row number are known
    """A row that can't be trained on; `field` is the path inside the row, None for the whole row."""

    def __init__(self, field: str | None, reason: str) -> None:
        self.field, self.reason = field, reason
        super().__init__(reason)


def or_bad_row(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result, or the BadRow that was raised."""
    try:
        return function(*arguments)
    except BadRow as error:
        return error


def is_missing(value: Any) -> bool:
    """Return whether a value is missing: null, or NaN as in empty cells of tables."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_blank(value: Any) -> bool:
    """Return whether a value is missing, empty, or text such as `null`."""
    if isinstance(value, str):
        return value.strip() in ("", "[]", "{}", "null", "None")
    return is_missing(value) or (isinstance(value, (list, dict, tuple)) and not value)


def required_text(row: Values, field: str) -> str:
    """Return the text in `field`. Raise BadRow for missing, empty or invalid text."""
    text, value = optional_text(row, field), row.get(field)
    if not text.strip():
        raise BadRow(field, f"is {type_phrase(value)}" if is_missing(value) else "is empty")
    return text


def optional_text(row: Values, field: str) -> str:
    """Return the text in `field`, empty when missing. Raise BadRow."""
    value = row.get(field)
    return "" if is_missing(value) else valid_text(value, field)


def valid_text(value: Any, field: str) -> str:
    """Return text that can be encoded as UTF-8. Raise BadRow."""
    if not isinstance(value, str):
        raise BadRow(field, f"is {type_phrase(value)}, not text")
    if len(value) > ROW_LIMIT:
        raise BadRow(field, f"has {len(value):,} characters; the limit of one row is {ROW_LIMIT:,}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        code_point = ord(value[error.start])
        if 0xDC80 <= code_point <= 0xDCFF:  # surrogateescape decodes an invalid byte to this range
            raise BadRow(field, f"is not UTF-8: byte 0x{code_point - 0xDC00:02x} at character {error.start + 1}") from None
        raise BadRow(field, f"has a lone surrogate (\\u{code_point:04x}) at character {error.start + 1}") from None
    return value


def valid_json(value: Any, field: str) -> Any:
    """Return a value that JSON can hold. Raise BadRow."""
    try:
        valid_text(json.dumps(value, allow_nan=False, ensure_ascii=False), field)
    except (TypeError, ValueError, RecursionError) as error:
        raise BadRow(field, f"can't be written as JSON: {error}") from None
    return value


def parse_if_text(value: Any, field: str) -> Any:
    """Parse a string as JSON, and return other values unchanged. Raise BadRow."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise BadRow(field, f"is text that isn't JSON: {quoted(value)}") from None


def type_phrase(value: Any) -> str:
    """Return a value's type for a message: `the number 5`, `a list`."""
    if is_missing(value):
        return "missing" if value is None else "NaN"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and abs(value) >= 10**15:
        return "a very large number"  # which may not fit a float
    if isinstance(value, (int, float)):
        return f"the number {value:g}"
    names: dict[type, str] = {str: "text", list: "a list", tuple: "a list", dict: "an object", bytes: "raw bytes"}
    return names.get(type(value), f"a {type(value).__name__}")


def quoted(value: str, limit: int = 40) -> str:
    """Quote a row's text, safe to print and shortened."""
    representation = repr(value[: limit + 1])
    # `repr` adds two quotes
    return representation if len(representation) <= limit + 2 else f"{representation[: limit - 1]}..."
