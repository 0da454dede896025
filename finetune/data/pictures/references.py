"""Read references to images in a row: paths or bytes, without opening them."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from finetune.data.checks import BadRow, Values, is_blank, parse_if_text, quoted, type_phrase
from finetune.data.pictures.source import MAX_FILE_BYTES

#: An image in a message's text: OBJECT REPLACEMENT CHARACTER.
PICTURE_MARK = "\ufffc"
#: Types of content parts that are images: of transformers and TRL, of OpenAI's two interfaces.
PICTURE_PARTS = ("image", "image_url", "input_image")
_DATA_URI = re.compile(r"data:(?P<type>[^;,]*)(?P<options>(?:;[^;,]*)*),", re.IGNORECASE)
_SCHEME = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]+):/")
#: Beginnings of PNG, JPEG, GIF and WebP in base64.
_BASE64_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
_MIN_BASE64 = 64
#: Characters of a path that are shown.
_SHOWN_PATH = 120


@dataclass(frozen=True)
class PictureReference:
    """An image as a row names it."""

    #: Where in the row.
    field: str
    path: str | None = None
    content: bytes | None = None

    @property
    def label(self) -> str:
        return "" if self.path is None else f": {quoted(self.path, _SHOWN_PATH)}"


def picture_references(value: Any, field: str) -> list[PictureReference]:
    """Read the images in a column: one, a list, or JSON of a list. Raise BadRow."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_if_text(value, field)
    if is_blank(value):
        return []
    if isinstance(value, (list, tuple)):
        return [picture_reference(item, f"{field}[{index}]") for index, item in enumerate(value)]
    return [picture_reference(value, field)]


def picture_reference(value: Any, field: str) -> PictureReference:
    """Read a path, a data: URI, bytes, or an object with one of these. Raise BadRow."""
    # objects as OpenAI and `datasets` write them
    return _from_object(value, field, _OBJECT_KEYS) if isinstance(value, dict) else _plain(value, field)


def _plain(value: Any, field: str) -> PictureReference:
    if isinstance(value, dict):
        return _from_object(value, field, _INNER_KEYS)
    if isinstance(value, bytes):
        return PictureReference(field, content=value)
    if is_blank(value):
        raise BadRow(field, "is empty" if isinstance(value, (str, list)) else f"is {type_phrase(value)}")
    if not isinstance(value, str):
        raise BadRow(field, f"is {type_phrase(value)}, not an image's path, bytes or data: URL")
    return _from_text(value, field)


def part_reference(part: Values, path: str) -> PictureReference | None:
    """Return a content part's image; None to take the column's next image. Raise BadRow."""
    if part.get("type") in ("image_url", "input_image") and is_blank(part.get("image_url")):
        raise BadRow(path, "is an image without image_url" + ("; file_id works only at OpenAI" if part.get("file_id") else ""))
    filled = {key: value for key, value in part.items() if key in _OBJECT_KEYS and not is_blank(value)}
    return _from_object(filled, path, _OBJECT_KEYS) if filled else None


def _from_object(value: Values, field: str, keys: _Keys) -> PictureReference:
    for key, read in keys.items():
        if not is_blank(value.get(key)):
            return read(value[key], f"{field}.{key}")
    raise BadRow(field, f"is an object without {', '.join(keys)}; an image has one of them")


def _from_text(text: str, field: str) -> PictureReference:
    text = text.strip()
    if match := _DATA_URI.match(text):
        if ";base64" not in match["options"].lower():
            raise BadRow(field, "is a data: URL without base64")
        if match["type"] and not match["type"].lower().startswith(("image/", "application/octet-stream")):
            raise BadRow(field, f"is a data: URL of {quoted(match['type'])}, not of an image")
        return _from_base64(text[match.end() :], field)
    if text[:5].lower() == "data:":
        raise BadRow(field, "is a data: URL without a comma before its content")
    if scheme := _SCHEME.match(text):
        if scheme["scheme"].lower() == "file" and text[5:7] == "//":
            return PictureReference(field, path=unquote(text[7:]))
        problem = "is a URL, and images are not downloaded; download it, and give its path"
        raise BadRow(field, f"{problem}: {quoted(text, _SHOWN_PATH)}")
    # base64 without data:, which has no dots
    if len(text) > _MIN_BASE64 and text.startswith(_BASE64_BEGINNINGS) and "." not in text[:_MIN_BASE64]:
        return _from_base64(text, field)
    return PictureReference(field, path=text)


def _from_base64(text: Any, field: str) -> PictureReference:
    if not isinstance(text, str):
        raise BadRow(field, f"is {type_phrase(text)}, not base64")
    if len(text) > MAX_FILE_BYTES:
        raise BadRow(field, f"has more than {MAX_FILE_BYTES // 2**20} MiB, the limit of one image")
    try:
        return PictureReference(field, content=base64.b64decode("".join(text.split()), validate=True))
    except (binascii.Error, ValueError):
        raise BadRow(field, "is not base64") from None


def _from_bytes(value: Any, field: str) -> PictureReference:
    return PictureReference(field, content=value) if isinstance(value, bytes) else _from_base64(value, field)


_Keys = dict[str, Callable[[Any, str], PictureReference]]
#: Keys of an object that is an image, and of an object inside, such as `{"url": ...}`, in the order of search -> their reader.
_INNER_KEYS: _Keys = {"url": _plain, "path": _plain, "bytes": _plain, "data": _from_base64}
_OBJECT_KEYS: _Keys = {
    "bytes": _from_bytes, "base64": _from_base64, "image_url": _plain, "image": _plain, "url": _plain, "path": _plain,
    "source": _plain,
}  # fmt: skip
