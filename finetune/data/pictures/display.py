"""Pictures and their tokens as people see them: small pictures for the page, and runs of one token as a count."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from finetune.data.pictures.placement import text_pieces
from finetune.data.pictures.source import BadPicture, PictureSource, open_picture

if TYPE_CHECKING:
    from finetune.data.conversation import Message

#: Longer side of a small picture in pixels, and how many of a row are shown.
_SIDE, _SHOWN = 160, 4
#: A token in angle or square brackets that stands four times or more in turn, as those of a picture do.
_REPEATED = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]{1,40}\])\1{3,}")


def with_counts(text: str) -> str:
    """The text with a token that stands many times in turn as the token and how often."""
    return _REPEATED.sub(lambda tokens: f"{tokens[1]} x {len(tokens[0]) // len(tokens[1]):,} ", text)


def shown_message(message: Message, pictures: Sequence[PictureSource]) -> dict[str, Any]:
    """A message's role, its text without marks, and small copies of its pictures, which are the first of `pictures`."""
    text = "\n".join(text_pieces(message)) if "pictures" in message else str(message.get("content") or "")
    count = message.get("pictures", 0)
    small = [_small(source) for source in pictures[: min(count, _SHOWN)]]
    return {"role": str(message["role"]), "text": text[:4000], "pictures": small, "more_pictures": max(0, count - _SHOWN)}


def _small(source: PictureSource) -> dict[str, Any]:
    """A small JPEG as a data: address, empty for a file that is gone; and the size of the picture."""
    try:
        picture = open_picture(source)
    except BadPicture:
        address = ""
    else:
        picture.thumbnail((_SIDE, _SIDE))
        buffer = BytesIO()
        picture.save(buffer, "JPEG", quality=80)
        address = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"address": address, "width": source.width, "height": source.height}
