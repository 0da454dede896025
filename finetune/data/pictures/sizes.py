"""Remember sizes of checked images in the cache, so that each is decoded once for all runs."""

from __future__ import annotations

import os
import re
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

from finetune.data.pictures.source import MAX_ASPECT, MAX_PIXELS, MIN_SIDE
from finetune.errors import DiskFull
from finetune.files import cache_dir, write_text
from finetune.system import replace

#: Most images whose sizes are remembered; a line has 55 bytes.
MAX_SIZES = 200_000
_LINE = re.compile(r"([0-9a-f]{40}) (\d{1,5}) (\d{1,5})\n")


def pictures_folder() -> Path:
    """Return the folder of sizes, and of images stored in rows."""
    return cache_dir() / "pictures"


@cache
def size_cache(folder: Path) -> SizeCache:
    """Return the sizes in a folder, read once in a process."""
    return SizeCache(folder)


class SizeCache:
    """Sizes of checked images, by digest."""

    def __init__(self, folder: Path) -> None:
        # other limits, other answers
        self.path = folder / f"sizes-{MAX_PIXELS}-{MIN_SIDE}-{MAX_ASPECT}.txt"
        self._lock = threading.Lock()
        self._sizes: dict[str, tuple[int, int]] = {}
        with suppress(OSError, ValueError):
            # other processes append to the file; a damaged line is left out
            lines = self.path.read_text("ascii").splitlines(keepends=True)
            self._sizes = {match[1]: (int(match[2]), int(match[3])) for line in lines if (match := _LINE.fullmatch(line))}
            if len(lines) > MAX_SIZES:
                self._sizes = dict(list(self._sizes.items())[-MAX_SIZES // 2 :])
                write_text(self.path, "".join(_line(digest, size) for digest, size in self._sizes.items()))

    def get(self, digest: str) -> tuple[int, int] | None:
        """Return width and height; None for an unchecked image."""
        return self._sizes.get(digest)

    def add(self, digest: str, size: tuple[int, int]) -> None:
        with self._lock:
            self._sizes[digest] = size
            if len(self._sizes) > MAX_SIZES:
                del self._sizes[next(iter(self._sizes))]
            # a disk that can't be written costs only time
            with suppress(OSError):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with self.path.open("a", encoding="ascii") as file:
                    file.write(_line(digest, size))


def store_bytes(content: bytes, digest: str) -> Path:
    """Store an image whose bytes stand in a row. Raise DiskFull."""
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


def _line(digest: str, size: tuple[int, int]) -> str:
    return f"{digest} {size[0]} {size[1]}\n"
