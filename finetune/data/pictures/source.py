"""Find the images of rows, check and measure them, and read their bytes, RGB pixels and thumbnails."""

from __future__ import annotations

import base64
import os
import re
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.checks import BadRow
from finetune.data.pictures.placement import MAX_FILE_BYTES, PictureReference
from finetune.errors import DiskFull, PackagesError
from finetune.files import cache_dir, read_limited
from finetune.system import replace

if TYPE_CHECKING:
    from PIL.Image import Image

#: Pixels of one image: 50-megapixel photos pass, and one decoded image takes 256 MB at most (4 bytes a pixel).
MAX_PIXELS = 64_000_000
#: Shortest side. Image processors take an axis of 1 or 3 for the colour channels.
MIN_SIDE = 4
#: Longer side over shorter side, from which an image is refused: Qwen2-VL's resize raises above it.
MAX_ASPECT = 200
MAX_PICTURES = 16  # images of one message in a chat
_THUMBNAIL_SIDE = 160  # the longer one, in pixels
_ROW_THUMBNAILS = 4  # at most
#: Formats that are opened: files are untrusted, and EPS, for example, starts Ghostscript.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
#: Modes that have no more than 8 bits a channel.
_EIGHT_BIT = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
_SIXTEEN_BIT = ("I;16", "I;16B", "I;16L", "I;16N")
_EXIF_ORIENTATION = 0x0112


class BadPicture(Exception):
    """An image that can't be trained on; the reason follows the image's name."""


@dataclass(frozen=True)
class PictureSource:
    """A checked image in a file."""

    path: Path
    digest: str
    #: After EXIF turning.
    width: int
    height: int

    def read(self) -> bytes:
        """Read the bytes. Raise BadPicture if the file is gone or changed."""
        content = read_bytes(self.path)
        if digest_of(content) != self.digest:
            raise BadPicture("was changed since it was read")
        return content


def source_from_dict(values: dict[str, Any]) -> PictureSource:
    """Read an image of a stored row."""
    return PictureSource(**values | {"path": Path(values["path"])})


def source_to_dict(source: PictureSource) -> dict[str, Any]:
    """Return an image as JSON values."""
    return vars(source) | {"path": str(source.path)}


def digest_of(content: bytes) -> str:
    """Return blake2b of an image's bytes, in hexadecimal."""
    return blake2b(content, digest_size=20).hexdigest()


def read_bytes(path: Path) -> bytes:
    """Read an image's file. Raise BadPicture."""
    try:
        if not path.is_file():
            raise BadPicture("is a folder" if path.is_dir() else "is not a file" if path.exists() else "is missing")
        return read_limited(path, MAX_FILE_BYTES)
    except OSError as error:
        raise BadPicture(f"can't be read: {error.strerror or error}") from None
    except ValueError:
        raise BadPicture(f"has more than {MAX_FILE_BYTES // 2**20} MiB, the limit of one image file") from None


def checked_size(content: bytes) -> tuple[int, int]:
    """Return width and height after EXIF turning. Raise BadPicture or PackagesError."""
    with _opened(content) as image:
        width, height = image.size
        # decoded once to find damage, JPEG at an eighth of its size
        image.draft("RGB", (max(1, width // 8), max(1, height // 8)))
        with _decoding():
            image.load()
        # 5 to 8 turn by 90 degrees (EXIF 2.32, 4.6.4)
        return (height, width) if _orientation(image) >= 5 else (width, height)


def picture_file(path: Path) -> PictureSource:
    """Check the image in a file. Raise BadPicture or PackagesError."""
    content = read_bytes(path)
    width, height = checked_size(content)
    return PictureSource(path, digest_of(content), width, height)


def open_picture(source: PictureSource) -> Image:
    """Open an image in RGB, turned as EXIF says, alpha on white. Raise BadPicture."""
    with _opened(source.read()) as image:
        from PIL import ImageOps

        with _decoding():
            image.load()
        picture = _as_rgb(image)
        picture.info.clear()  # other EXIF data may be damaged
        picture.getexif()[_EXIF_ORIENTATION] = _orientation(image)
    ImageOps.exif_transpose(picture, in_place=True)
    return picture


def thumbnails(pictures: Sequence[PictureSource]) -> list[dict[str, Any]]:
    """Return thumbnails of a row's first images."""
    return [thumbnail(source) for source in pictures[:_ROW_THUMBNAILS]]


def file_thumbnail(path: Path) -> dict[str, Any]:
    """Return the thumbnail of an image file."""
    try:
        return thumbnail(picture_file(path))
    except (BadPicture, PackagesError):
        return {"address": "", "width": 0, "height": 0}


def thumbnail(source: PictureSource) -> dict[str, Any]:
    """Return a JPEG as a data: URL, empty for an unusable file, and the image's size."""
    try:
        picture = open_picture(source)
    except BadPicture:
        address = ""
    else:
        picture.thumbnail((_THUMBNAIL_SIDE, _THUMBNAIL_SIDE))
        buffer = BytesIO()
        picture.save(buffer, "JPEG", quality=80)
        address = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"address": address, "width": source.width, "height": source.height}


def require_pillow() -> None:
    """Raise PackagesError if Pillow is missing."""
    try:
        import PIL.Image  # noqa: F401
    except ImportError:
        raise PackagesError(
            "the rows have images, and the package that opens them is missing: pillow",
            "Install it: pip install 'pillow>=11.3,<13' (the extra 'vision')",
        ) from None


def size_problem(width: int, height: int) -> str | None:
    """Return why an image's size is refused, or None."""
    if width * height > MAX_PIXELS:
        return f"has {width:,} x {height:,} pixels, {too_many_pixels(width * height)}"
    if min(width, height) < MIN_SIDE:
        return f"has {width} x {height} pixels; the shorter side must have at least {MIN_SIDE}"
    if max(width, height) >= MAX_ASPECT * min(width, height):
        return f"has {width:,} x {height:,} pixels, one side at least {MAX_ASPECT} times as long as the other"
    return None


def too_many_pixels(pixels: int | None) -> str:
    """Describe a number of pixels above the limit; None: unknown."""
    count = f"{pixels / 1e6:,.0f} megapixels" if pixels else "too many pixels"
    return f"{count}; the limit is {MAX_PIXELS // 10**6} megapixels"


@contextmanager
def _decoding() -> Iterator[None]:
    from PIL import Image, UnidentifiedImageError

    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    except MemoryError:
        raise
    except Image.DecompressionBombError as error:
        count = re.search(r"\d+", str(error))
        raise BadPicture(f"has {too_many_pixels(int(count[0]) if count else None)}") from None
    except UnidentifiedImageError:
        raise BadPicture(f"is not an image in one of the formats {', '.join(_FORMATS)}") from None
    except Exception as error:  # noqa: BLE001 - decoders raise SyntaxError, struct.error, KeyError and others
        message = str(error).split("\n")[0][:100]
        is_cut = "truncated" in message.lower()
        raise BadPicture("is truncated" if is_cut else f"is damaged: {message or type(error).__name__}") from None


def _opened(content: bytes) -> Image:
    require_pillow()
    from PIL import Image

    if not content:
        raise BadPicture("is empty (0 bytes)")
    with _decoding():  # decodes no pixels
        image = Image.open(BytesIO(content), formats=_FORMATS)
    # files are untrusted: the size is checked before anything is decoded
    if problem := size_problem(*image.size):
        raise BadPicture(problem)
    if image.mode not in (*_EIGHT_BIT, *_SIXTEEN_BIT):
        raise BadPicture(f"has pixels of mode {image.mode}; 8 or 16 bits a channel can be read")
    with _decoding():  # is_animated looks for a next frame; phones write photos as MPO, a JPEG with more frames
        is_animated = image.format not in ("JPEG", "MPO") and bool(getattr(image, "is_animated", False))
    if is_animated:
        raise BadPicture("is animated or has several pages; only one is allowed")
    return image


def _orientation(image: Image) -> int:
    # unreadable EXIF data turns nothing
    with suppress(Exception), warnings.catch_warnings(action="ignore"):
        value = image.getexif().get(_EXIF_ORIENTATION, 1)
        return value if isinstance(value, int) and 1 <= value <= 8 else 1
    return 1


def _as_rgb(image: Image) -> Image:
    import PIL.Image

    if image.mode in _SIXTEEN_BIT:
        import numpy as np

        # Pillow would clip 16 bits; 65535 / 257 = 255
        return PIL.Image.fromarray((np.asarray(image) // 257).astype(np.uint8)).convert("RGB")
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        with_alpha = image if image.mode == "RGBA" else image.convert("RGBA")
        on_white = PIL.Image.new("RGB", image.size, (255, 255, 255))
        on_white.paste(with_alpha, mask=with_alpha.getchannel("A"))
        return on_white
    return image.convert("RGB")


#: Most images whose sizes are cached; a line of the file has 55 bytes.
MAX_SIZES = 200_000
_SIZE_LINE = re.compile(r"([0-9a-f]{40}) (\d{1,5}) (\d{1,5})\n")  # digest, width, height
FileStat = tuple[int, int, int] | None  # size, modification time and inode of a file; None if it is missing


class PictureReader:
    """Checks images in the data file's folder and in `image_folder`."""

    def __init__(self, folder: Path | None, image_folder: str | None) -> None:
        require_pillow()
        # not Path.resolve(): symbolic links must not be followed
        folders = (image_folder and os.path.expanduser(image_folder), folder)  # noqa: PTH111
        self._folders = [Path(os.path.abspath(path)) for path in folders if path is not None]  # noqa: PTH100
        #: Checked files and their stat; cached rows are valid until a stat changes.
        self.files: dict[str, FileStat] = {}
        self._sizes = size_cache(pictures_folder())

    def read(self, reference: PictureReference) -> PictureSource:
        """Check an image. Raise BadRow if it can't be used."""
        try:
            path = None if reference.path is None else self._find(reference)
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

    def _find(self, reference: PictureReference) -> Path:
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


class SizeCache(dict[str, tuple[int, int]]):
    """Sizes of checked images by digest, shared by all runs."""

    def __init__(self, folder: Path) -> None:
        # images in the file passed the checks, which depend on these limits
        self.path = folder / f"sizes-{MAX_PIXELS}-{MIN_SIDE}-{MAX_ASPECT}.txt"
        with suppress(OSError, ValueError):
            # other processes append to the file; a damaged line is left out
            matches = map(_SIZE_LINE.fullmatch, self.path.read_text("ascii").splitlines(keepends=True))
            self.update({match[1]: (int(match[2]), int(match[3])) for match in matches if match})

    def add(self, digest: str, size: tuple[int, int]) -> None:
        if is_full := len(self) >= MAX_SIZES:
            self.clear()
        self[digest] = size
        with suppress(OSError):  # without the file, a later run decodes the images again
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("w" if is_full else "a", encoding="ascii") as file:
                file.write(f"{digest} {size[0]} {size[1]}\n")


size_cache = cache(SizeCache)  # sizes in a folder, read once in a process


def pictures_folder() -> Path:
    """Return the folder of cached sizes and images."""
    return cache_dir() / "pictures"


def _store(content: bytes, digest: str) -> Path:
    path = pictures_folder() / "bytes" / digest[:2] / digest
    if path.is_file():
        return path
    temporary = path.with_name(f".{digest}.{os.getpid()}.{threading.get_ident()}")
    with disk_errors(path.parent, "images of rows"):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(content)
            replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return path


@contextmanager
def disk_errors(folder: Path, content: str) -> Iterator[None]:
    """Raise DiskFull for an error of writing into the cache."""
    try:
        yield
    except OSError as error:
        raise DiskFull(
            f"{folder}: {content} can't be written: {error.strerror or error}",
            "Free some space (`finetune cache clear` deletes older rows), or set FINETUNE_CACHE to a folder on another disk.",
        ) from None


def file_stat(path: Path) -> FileStat:
    """Return size, modification time and inode; None without the file."""
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return None
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
