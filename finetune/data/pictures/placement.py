"""Find a row's images, as paths or bytes, without opening them, and mark their places in its texts."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

from finetune.data.checks import BadRow, Values, is_blank, parse_if_text, quoted, type_phrase

if TYPE_CHECKING:
    from finetune.data.conversation import Example, Message

#: Bytes of one image; one of 64 megapixels without compression has 192 MB.
MAX_FILE_BYTES = 256 * 2**20
PICTURE_MARK = "\ufffc"  # an image in a message's text: OBJECT REPLACEMENT CHARACTER
#: Types of content parts that are images: of transformers and TRL, of OpenAI's two interfaces.
PICTURE_PARTS = ("image", "image_url", "input_image")
_DATA_URI = re.compile(r"data:(?P<type>[^;,]*)(?P<options>(?:;[^;,]*)*),", re.IGNORECASE)
_SCHEME = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]+):/")
#: Beginnings of PNG, JPEG, GIF and WebP in base64.
_BASE64_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR")
_MIN_BASE64 = 64  # characters; shorter text is a path
_SHOWN_PATH = 120  # characters of a path in a message


@dataclass(frozen=True)
class PictureReference:
    """An image as a row names it."""

    field: str  # where in the row
    path: str | None = None
    content: bytes | None = None

    @property
    def label(self) -> str:
        return "" if self.path is None else f": {quoted(self.path, _SHOWN_PATH)}"


def _from_value(value: Any, field: str) -> PictureReference:
    if isinstance(value, dict):
        return _from_object(value, field, _INNER_READERS)
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
    has_image = any(not is_blank(part.get(key)) for key in _OBJECT_READERS)
    return _from_object(part, path, _OBJECT_READERS) if has_image else None


def _from_object(value: Values, field: str, readers: _Readers) -> PictureReference:
    for key, read in readers.items():
        if not is_blank(value.get(key)):
            return read(value[key], f"{field}.{key}")
    raise BadRow(field, f"is an object without {', '.join(readers)}; an image has one of them")


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
    if isinstance(text, bytes):
        return PictureReference(field, content=text)
    if not isinstance(text, str):
        raise BadRow(field, f"is {type_phrase(text)}, not base64")
    if len(text) > MAX_FILE_BYTES:
        raise BadRow(field, f"has more than {MAX_FILE_BYTES // 2**20} MiB, the limit of one image")
    try:
        return PictureReference(field, content=base64.b64decode("".join(text.split()), validate=True))
    except (binascii.Error, ValueError):
        raise BadRow(field, "is not base64") from None


#: Key of an object, in the order of search -> the reader of its value.
_Readers = dict[str, Callable[[Any, str], PictureReference]]
#: Of an object inside an image, such as OpenAI's `"image_url": {"url": ...}`.
_INNER_READERS: _Readers = {"url": _from_value, "path": _from_value, "bytes": _from_value, "data": _from_base64}
#: Of an object that is an image.
_OBJECT_READERS: _Readers = {
    "bytes": _from_base64,
    "base64": _from_base64,
    **dict.fromkeys(("image_url", "image", "url", "path", "source"), _from_value),
}


IMAGE_TAG = "<image>"  # other tools' mark for an image of the row in a text
_PICTURE_COLUMNS = ("images", "image")
#: Columns of a metadata file that name image files beside it, as `datasets` reads a folder of images.
_METADATA_COLUMNS = ("file_name", "file_names")
# In an Example an image is U+FFFC (Unicode's character for embedded objects) in a message's text. The message counts its
# images in `pictures`, and the Example has them in order. So code that reads texts works on rows with images, too.
_LITERAL_MARK = "has the character U+FFFC in its text, which stands for an image; remove it"
_METADATA_FILE = re.compile(r"metadata\.(jsonl|ndjson|json|csv|tsv|parquet)(\.gz|\.zst)?$")


class PictureUse(NamedTuple):
    """How a file's rows have images."""

    columns: tuple[str, ...]
    are_usual: bool  # some of the first rows have an image
    have_tags: bool  # most of the first rows have `<image>` and some an image


def picture_use(file: str, rows: Sequence[Values]) -> PictureUse:
    """Return how the first rows of a file of this name have images."""
    columns = _PICTURE_COLUMNS + _METADATA_COLUMNS if _METADATA_FILE.search(file) else _PICTURE_COLUMNS
    in_columns = any(not is_blank(row.get(name)) for row in rows for name in columns)
    are_usual = in_columns or any(_has_picture_part(value) for row in rows for value in row.values())
    return PictureUse(columns, are_usual, have_tags=are_usual and 2 * sum(map(_has_tag, rows)) > len(rows))


def _has_picture_part(value: Any) -> bool:
    messages = value if isinstance(value, list) else ()
    contents = (message.get("content") for message in messages if isinstance(message, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type") in PICTURE_PARTS for part in parts)


def _has_tag(value: Any) -> bool:
    if isinstance(value, str):
        return IMAGE_TAG in value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_tag, items))


def message_with_pictures(text: str, count: int) -> Values:
    """Return a user's message with `count` images first."""
    if not count:
        return {"role": "user", "content": text}
    # a mark in the text would count as another image
    return {"role": "user", "content": PICTURE_MARK * count + text.replace(PICTURE_MARK, ""), "pictures": count}


def take_pictures(row: Values, columns: Sequence[str]) -> tuple[Values, list[PictureReference] | None]:
    """Split off a row's images: one, a list, or JSON of a list; None without an image column. Raise BadRow."""
    present = [name for name in columns if name in row]
    if not present:
        return row, None
    filled = [name for name in present if not is_blank(row[name])]
    if len(filled) > 1:
        raise BadRow(filled[1], f"has images, and so does column {filled[0]}; leave one out with dataset.ignore_columns")
    other_columns = {name: value for name, value in row.items() if name not in present}
    if not filled:
        return other_columns, []
    [name] = filled
    value = row[name]
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = parse_if_text(value, name)
    items = {f"{name}[{index}]": item for index, item in enumerate(value)} if isinstance(value, list) else {name: value}
    references = [  # objects as OpenAI and `datasets` write them
        _from_object(item, field, _OBJECT_READERS) if isinstance(item, dict) else _from_value(item, field)
        for field, item in items.items()
    ]
    return other_columns, references


def place_pictures(
    example: Example, column: list[PictureReference] | None, use: PictureUse
) -> tuple[Example, list[PictureReference]]:
    """Mark each image in the texts, and return the images in order. Raise BadRow."""
    # a content part has an image, the index of an image in the column, or takes the column's next image (None)
    parts: list[PictureReference | int | None] = [part for message in example.messages for part in message.get("pictures", ())]
    if not parts and not column:
        tag_count = sum(text.count(IMAGE_TAG) for text in example.texts()) if use.are_usual else 0
        if tag_count:
            raise BadRow(None, f"has {tag_count} {IMAGE_TAG} in its text and no image")
        return example, []
    example, references = _as_conversation(example), column or []
    messages = example.messages
    if parts:
        references = _fill_parts(parts, references, example)
    else:
        messages = _with_marks(messages, len(references), expects_tags=use.have_tags)
    for index in example.answers:
        if PICTURE_MARK in messages[index]["content"]:
            raise BadRow(f"messages[{index}]", "the assistant's answer has an image; answers are text")
    return replace(example, messages=tuple(map(_with_count, messages))), references


def _with_count(message: Message) -> Message:
    fields = {key: value for key, value in message.items() if key != "pictures"}
    count = message["content"].count(PICTURE_MARK)
    return {**fields, "pictures": count} if count else fields


def _fill_parts(
    parts: list[PictureReference | int | None], column: list[PictureReference], example: Example
) -> list[PictureReference]:  # fmt: skip
    texts = example.texts()
    if any(IMAGE_TAG in text for text in texts):
        raise BadRow(None, f"has images as parts of its messages and {IMAGE_TAG} in its text; one of them is wrong")
    if sum(text.count(PICTURE_MARK) for text in texts) != len(parts):
        raise BadRow(None, _LITERAL_MARK)
    open_parts = [part for part in parts if not isinstance(part, PictureReference)]  # which take an image of the column
    if len(open_parts) != len(column):
        raise BadRow(None, f"has {len(open_parts)} image part(s) without an image of their own and {len(column)} image(s)")
    indices = [position if part is None else part for position, part in enumerate(open_parts)]
    if sorted(indices) != list(range(len(column))):
        raise BadRow(None, f"has image parts with the index {', '.join(map(str, indices))} for {len(column)} image(s)")
    next_index = iter(indices)
    return [part if isinstance(part, PictureReference) else column[next(next_index)] for part in parts]


def _with_marks(messages: tuple[Message, ...], count: int, *, expects_tags: bool) -> tuple[Message, ...]:
    if any(PICTURE_MARK in message["content"] for message in messages):
        raise BadRow(None, _LITERAL_MARK)
    tag_count = sum(message["content"].count(IMAGE_TAG) for message in messages)
    if tag_count != count and (tag_count or expects_tags):
        raise BadRow(None, f"has {tag_count} {IMAGE_TAG} in its text and {count} image(s)")
    if tag_count:
        return tuple({**message, "content": message["content"].replace(IMAGE_TAG, PICTURE_MARK)} for message in messages)
    # in a file without tags, images stand before the first user's text, as in TRL
    first_user = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if first_user is None:
        raise BadRow(None, "has images and no user message to put them in")
    marked = {**messages[first_user], "content": PICTURE_MARK * count + messages[first_user]["content"]}
    return (*messages[:first_user], marked, *messages[first_user + 1 :])


def _as_conversation(example: Example) -> Example:
    if example.is_pair or example.desirable is not None:
        raise BadRow(None, "has images; pairs and labelled answers with images can't be trained on")
    if example.messages:
        return example
    answer = example.text if example.text is not None else example.completion
    if example.text is not None and IMAGE_TAG in example.text:
        raise BadRow("text", f"has {IMAGE_TAG}; write the row as messages, or as prompt and completion")
    # only a chat template says where an image stands
    messages = ({"role": "user", "content": example.prompt or ""}, {"role": "assistant", "content": answer})
    return replace(example, messages=messages, answers=(1,), prompt=None, completion=None, text=None)


def with_parts(messages: list[Message]) -> list[Message]:
    """Return the messages with text and image parts as content; unchanged without an image."""
    if not any("pictures" in message for message in messages):
        return messages
    return [
        {key: value for key, value in message.items() if key != "pictures"} | {"content": _parts_of(message)}
        for message in messages
    ]


def _parts_of(message: Message) -> list[Values]:
    if "pictures" not in message:  # the mark is a character like others
        return [{"type": "text", "text": message["content"]}] if message["content"] else []
    pieces = re.split(f"({PICTURE_MARK})", message["content"])
    return [{"type": "image"} if piece == PICTURE_MARK else {"type": "text", "text": piece} for piece in pieces if piece]


def text_pieces(message: Message) -> list[str]:
    """Return a message's texts between its images, stripped."""
    if "pictures" not in message:
        return [message["content"].strip()]
    return [piece.strip() for piece in message["content"].split(PICTURE_MARK) if piece.strip()]
