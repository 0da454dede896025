"""Find, check and size the images of a source's rows, in threads; sizes, and images stored in rows, are kept in the cache."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

from finetune.data.checks import BadRow
from finetune.data.pictures.placement import PictureReference
from finetune.data.pictures.source import (
    MAX_ASPECT,
    MAX_PIXELS,
    MIN_SIDE,
    BadPicture,
    PictureSource,
    checked_size,
    digest_of,
    read_bytes,
    require_pillow,
)
from finetune.errors import DiskFull
from finetune.files import cache_dir
from finetune.system import replace, usable_cpus

#: Threads that decode: Pillow releases the interpreter's lock, and each thread has one image in memory.
_MAX_THREADS = 4
#: Most images whose sizes are kept; a line has 55 bytes.
MAX_SIZES = 200_000
_LINE = re.compile(r"([0-9a-f]{40}) (\d{1,5}) (\d{1,5})")
#: Size, time and inode of a file that was looked at; None if there was none.
FileStat = tuple[int, int, int] | None


class PictureReader:
    """Checks images in the data file's folder and in `image_folder`."""

    def __init__(self, folder: str | None, image_folder: str | None) -> None:
        require_pillow()
        # not Path.resolve(): symbolic links must not be followed
        folders = (image_folder and os.path.expanduser(image_folder), folder)  # noqa: PTH111
        self._folders = [Path(os.path.abspath(path)) for path in folders if path is not None]  # noqa: PTH100
        #: Checked files and their stat; cached rows are valid until a stat changes.
        self.files: dict[str, FileStat] = {}
        self._sizes = size_cache(pictures_folder())

    def read(self, rows: Iterable[list[PictureReference]]) -> list[tuple[PictureSource, ...] | BadRow]:
        """Return each row's images, or why an image can't be used."""
        with ThreadPoolExecutor(min(_MAX_THREADS, usable_cpus())) as pool:
            return list(pool.map(self._read_row, rows))

    def _read_row(self, references: list[PictureReference]) -> tuple[PictureSource, ...] | BadRow:
        try:
            return tuple(map(self._read, references))
        except BadRow as error:
            return error

    def _read(self, reference: PictureReference) -> PictureSource:
        try:
            path = None if reference.path is None else self._path(reference)
            if path is not None:
                self.files[str(path)] = file_stat(path)
            content = read_bytes(path) if path is not None else reference.content or b""
            digest = digest_of(content)
            size = self._sizes.get(digest)
            if size is None:
                size = checked_size(content)
                self._sizes.add(digest, size)
        except BadPicture as error:
            raise BadRow(reference.field, f"{error}{reference.label}") from None
        if path is None:
            path = _store(content, digest)
            self.files[str(path)] = file_stat(path)
        return PictureSource(path, digest, *size)

    def _path(self, reference: PictureReference) -> Path:
        text = reference.path or ""
        if not self._folders:
            problem = "is a path, but the rows have no folder; put the image's bytes in the row"
            raise BadRow(reference.field, f"{problem}{reference.label}")
        candidates = [Path(os.path.abspath(folder / text)) for folder in self._folders]  # noqa: PTH100
        allowed = [path for path in candidates if any(map(path.is_relative_to, self._folders))]
        if not allowed:
            problem = f"is outside the data folder; to allow it:  dataset.image_folder={candidates[0].parent}"
            raise BadRow(reference.field, f"{problem}{reference.label}")
        return next((path for path in allowed if file_stat(path)), allowed[0])


class SizeCache:
    """Sizes of checked images by digest, so that each image is decoded once for all runs."""

    def __init__(self, folder: Path) -> None:
        # other limits, other answers
        self.path = folder / f"sizes-{MAX_PIXELS}-{MIN_SIDE}-{MAX_ASPECT}.txt"
        self._sizes: dict[str, tuple[int, int]] = {}
        with suppress(OSError, ValueError):
            # other processes append to the file; a damaged line is left out
            matches = map(_LINE.fullmatch, self.path.read_text("ascii").splitlines())
            self._sizes = {match[1]: (int(match[2]), int(match[3])) for match in matches if match}

    def get(self, digest: str) -> tuple[int, int] | None:
        """Return width and height; None for an unchecked image."""
        return self._sizes.get(digest)

    def add(self, digest: str, size: tuple[int, int]) -> None:
        is_full = len(self._sizes) >= MAX_SIZES
        if is_full:
            self._sizes.clear()
        self._sizes[digest] = size
        # a disk that can't be written costs only time
        with suppress(OSError):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w" if is_full else "a", encoding="ascii") as file:
                file.write(f"{digest} {size[0]} {size[1]}\n")


#: Sizes in a folder, read once in a process.
size_cache = cache(SizeCache)


def pictures_folder() -> Path:
    """Return the folder of sizes, and of images stored in rows."""
    return cache_dir() / "pictures"


def _store(content: bytes, digest: str) -> Path:
    path = pictures_folder() / "bytes" / digest[:2] / digest
    if path.is_file():
        return path
    temporary = path.with_name(f".{digest}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        replace(temporary, path)
    except OSError as error:
        raise DiskFull(
            f"{path.parent}: images of rows can't be written: {error.strerror or error}",
            "Free some space, or set FINETUNE_CACHE to a folder on another disk.",
        ) from None
    finally:
        temporary.unlink(missing_ok=True)
    return path


def file_stat(path: Path) -> FileStat:
    """Return size, modification time and inode; None without the file."""
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
