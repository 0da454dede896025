"""Place a row's images in its texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from finetune.data.checks import BadRow, Values, is_blank
from finetune.data.pictures.references import PICTURE_MARK, PICTURE_PARTS, PictureReference, picture_references

if TYPE_CHECKING:
    from finetune.data.conversation import Example, Message

#: Other tools' mark for an image of the row in a text.
IMAGE_TAG = "<image>"
#: Columns of images, and of image files beside a file of metadata, as `datasets` reads a folder of images.
PICTURE_COLUMNS = ("images", "image")
_METADATA_COLUMNS = ("file_name", "file_names")
# In an Example an image is U+FFFC (Unicode's character for embedded objects) in a message's text. The message counts its
# images in `pictures`, and the Example has them in order. So code that reads texts works on rows with images, too.
_LITERAL_MARK = "has the character U+FFFC in its text, which stands for an image; remove it"
_METADATA_FILE = re.compile(r"metadata\.(jsonl|ndjson|json|csv|tsv|parquet)(\.gz|\.zst)?$")


def picture_columns(file: str) -> tuple[str, ...]:
    """Return the image columns in a file of this name."""
    return (*PICTURE_COLUMNS, *_METADATA_COLUMNS) if _METADATA_FILE.search(file) else PICTURE_COLUMNS


def rows_have_pictures(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> bool:
    """Return whether a row has an image in a column or message part."""
    return any(
        any(not is_blank(row.get(name)) for name in columns) or any(map(_has_picture_part, row.values())) for row in rows
    )


def _has_picture_part(value: Any) -> bool:
    contents = (message.get("content") for message in value if isinstance(message, dict)) if isinstance(value, list) else ()
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and part.get("type") in PICTURE_PARTS for part in parts)


def rows_have_tags(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether most rows have `<image>` in a text."""
    return 2 * sum(any(map(_has_tag, row.values())) for row in rows) > len(rows)


def _has_tag(value: Any) -> bool:
    if isinstance(value, str):
        return IMAGE_TAG in value
    if isinstance(value, dict):
        return any(map(_has_tag, value.values()))
    return isinstance(value, list) and any(map(_has_tag, value))


def message_with_pictures(text: str, count: int) -> Values:
    """Return a user's message with `count` images first."""
    if not count:
        return {"role": "user", "content": text}
    # a mark in the text would count as another image
    return {"role": "user", "content": PICTURE_MARK * count + text.replace(PICTURE_MARK, ""), "pictures": count}


def take_pictures(row: Values, columns: Sequence[str]) -> tuple[Values, list[PictureReference] | None]:
    """Split off a row's images; None without an image column. Raise BadRow."""
    present = [name for name in columns if name in row]
    if not present:
        return row, None
    filled = [name for name in present if not is_blank(row[name])]
    if len(filled) > 1:
        raise BadRow(filled[1], f"has images, and so does column {filled[0]}; leave one out with dataset.ignore_columns")
    references = picture_references(row[filled[0]], filled[0]) if filled else []
    return {name: value for name, value in row.items() if name not in present}, references


def place_pictures(
    example: Example, column: list[PictureReference] | None, *, expects_pictures: bool, expects_tags: bool
) -> tuple[Example, list[PictureReference]]:
    """Mark each image in the texts, and return the images in order. Raise BadRow."""
    parts: list[PictureReference | int | None] = [
        reference for message in example.messages for reference in message.get("pictures", ())
    ]
    if not parts and not column:
        # `expects_pictures`: other rows of the file have images
        tags = sum(text.count(IMAGE_TAG) for text in example.texts()) if expects_pictures else 0
        if tags:
            raise BadRow(None, f"has {tags} {IMAGE_TAG} in its text and no image")
        return example, []
    example = _as_conversation(example)
    if parts:
        references = _fill_parts(parts, column or [], example)
        messages = example.messages
    else:
        references = column or []
        messages = _with_marks(example.messages, len(references), expects_tags=expects_tags)
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
    # a part has an image, the index of an image in the column, or takes the column's next image
    open_parts = [part for part in parts if not isinstance(part, PictureReference)]
    if len(open_parts) != len(column):
        raise BadRow(None, f"has {len(open_parts)} image part(s) without an image of their own and {len(column)} image(s)")
    order = [index if part is None else part for index, part in enumerate(open_parts)]
    if sorted(order) != list(range(len(column))):
        raise BadRow(None, f"has image parts with the index {', '.join(map(str, order))} for {len(column)} image(s)")
    following = map(column.__getitem__, order)
    return [part if isinstance(part, PictureReference) else next(following) for part in parts]


def _with_marks(messages: tuple[Message, ...], count: int, *, expects_tags: bool) -> tuple[Message, ...]:
    if any(PICTURE_MARK in message["content"] for message in messages):
        raise BadRow(None, _LITERAL_MARK)
    tags = sum(message["content"].count(IMAGE_TAG) for message in messages)
    if tags != count and (tags or expects_tags):
        raise BadRow(None, f"has {tags} {IMAGE_TAG} in its text and {count} image(s)")
    if tags:
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
        {**{key: value for key, value in message.items() if key != "pictures"}, "content": _parts_of(message)}
        for message in messages
    ]


def _parts_of(message: Message) -> list[Values]:
    # without images the mark is a character like others
    pieces = message["content"].split(PICTURE_MARK) if "pictures" in message else [message["content"]]
    parts: list[Values] = []
    for index, piece in enumerate(pieces):
        parts += ([{"type": "image"}] if index else []) + ([{"type": "text", "text": piece}] if piece else [])
    return parts


def text_pieces(message: Message) -> list[str]:
    """Return a message's texts between its images, stripped."""
    if "pictures" not in message:
        return [message["content"].strip()]
    return [piece.strip() for piece in message["content"].split(PICTURE_MARK) if piece.strip()]
