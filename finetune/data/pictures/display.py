"""Show images as thumbnails, and repeated image tokens as a count."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from finetune.data.pictures.source import BadPicture, PictureSource, open_picture, picture_file
from finetune.errors import PackagesError

#: Longer side of a thumbnail in pixels, and thumbnails of a row.
_MAX_SIDE, _SHOWN = 160, 4
#: A token in angle or square brackets that stands four times or more in turn, as an image's tokens do.
_REPEATED = re.compile(r"(<[^<>\s]{1,40}>|\[[A-Z_]{1,40}\])\1{3,}")


def with_counts(text: str) -> str:
    """Write a repeated token once, with its count."""
    return _REPEATED.sub(lambda tokens: f"{tokens[1]} x {len(tokens[0]) // len(tokens[1]):,} ", text)


def small_pictures(pictures: Sequence[PictureSource]) -> list[dict[str, Any]]:
    """Return thumbnails of a row's first images, with sizes."""
    return [small_copy(source) for source in pictures[:_SHOWN]]


def small_copy_of(path: Path) -> dict[str, Any]:
    """Return the thumbnail of an image file."""
    try:
        return small_copy(picture_file(path))
    except (BadPicture, PackagesError):
        return {"address": "", "width": 0, "height": 0}


def small_copy(source: PictureSource) -> dict[str, Any]:
    """Return a JPEG as a data: address, empty for a missing file, and the image's size."""
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
