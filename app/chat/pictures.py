"""Images of conversations, named by digest."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from finetune.data.pictures.source import BadPicture, PictureSource, picture_file
from finetune.errors import PackagesError

_NAME = re.compile("[0-9a-f]{40}")


def keep_picture(folder: Path, upload: str) -> str:
    """Move an upload into a folder; return its name. Raises BadPicture or PackagesError."""
    name = picture_file(Path(upload)).digest
    folder.mkdir(exist_ok=True)
    shutil.move(upload, folder / name)
    return name


def kept_pictures(folder: Path, names: Iterable[str]) -> list[PictureSource]:
    """Return the intact images of these names."""
    pictures = [_kept(folder / name) for name in names if _NAME.fullmatch(name)]
    return [picture for picture in pictures if picture is not None]


@functools.lru_cache(maxsize=256)
def _kept(path: Path) -> PictureSource | None:
    try:
        picture = picture_file(path)
    except (BadPicture, PackagesError):
        return None
    # the name is the stored image's digest: drop a file that was changed before its first read
    return picture if picture.digest == path.name else None
