"""Pictures and their tokens as people see them: small pictures for the page, and runs of one token as a count."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from finetune.data.pictures.source import BadPicture, PictureSource, open_picture, picture_file
from finetune.errors import PackagesError

#: Longer side of a small picture in pixels, and how many of a row are shown.
_MAX_SIDE, _SHOWN = 160, 4
#: A token in angle or square brackets that stands four times or more in turn, as those of a picture do.
_REPEATED = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]{1,40}\])\1{3,}")


def with_counts(text: str) -> str:
    """The text with a token that stands many times in turn as the token and how often."""
    return _REPEATED.sub(lambda tokens: f"{tokens[1]} x {len(tokens[0]) // len(tokens[1]):,} ", text)


def small_pictures(pictures: Sequence[PictureSource]) -> list[dict[str, Any]]:
    """Small copies of the first pictures of a row, with their sizes."""
    return [small_copy(source) for source in pictures[:_SHOWN]]


def small_copy_of(path: Path) -> dict[str, Any]:
    """The small copy of a picture file."""
    try:
        return small_copy(picture_file(path))
    except (BadPicture, PackagesError):
        return {"address": "", "width": 0, "height": 0}


def small_copy(source: PictureSource) -> dict[str, Any]:
    """A small JPEG as a data: address, empty for a file that is gone; and the size of the picture."""
    try:
        picture = open_picture(source)
    except BadPicture:
        address = ""
    else:
        picture.thumbnail((_MAX_SIDE, _MAX_SIDE))
        buffer = BytesIO()
        picture.save(buffer, "JPEG", quality=80)
        address = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"address": address, "width": source.width, "height": source.height}
