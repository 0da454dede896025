"""The cache folder, atomic writes, bounded reading of JSON, hashes, and free disk space."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from finetune.checksum import has_checksum, is_damaged, with_checksum
from finetune.errors import CommandError, DiskFull
from finetune.system import WINDOWS, replace


def cache_dir() -> Path:
    """Folder of measurements, forecasts and card queues: $FINETUNE_CACHE, else $XDG_CACHE_HOME/finetune, else
    ~/.cache/finetune, on Windows %LOCALAPPDATA%\\finetune."""
    if chosen := os.environ.get("FINETUNE_CACHE"):
        return Path(chosen)
    usual = os.environ.get("LOCALAPPDATA") if WINDOWS else None
    return Path(os.environ.get("XDG_CACHE_HOME") or usual or Path.home() / ".cache") / "finetune"


#: Bytes of JSON that are read: the largest tokenizers have 40 MB.
MAX_JSON_BYTES = 2**28
#: Values inside each other: well below what recursive functions can walk.
MAX_JSON_DEPTH = 100
#: Of a safetensors file: https://github.com/huggingface/safetensors#format
MAX_HEADER_BYTES = 100_000_000
#: What messages say of a file that can't be used, and what to do.
IS_LFS_POINTER, LFS_FIX = "is a pointer of git-lfs, not the file", "git lfs pull"
IS_GGUF = "is a GGUF file, which can't be trained"
GGUF_FIX = "Give the model that it was made from, and make a GGUF file of the result: finetune export RUN --to gguf"


def expanded(path_text: str) -> Path:
    """Return the path with `~` expanded, or unchanged if the user is unknown."""
    return Path(os.path.expanduser(path_text))  # noqa: PTH111


def read_limited(path: Path, max_bytes: int) -> bytes:
    """The content of a regular file. Raises OSError, also for other files (FIFOs wait), and ValueError if it is larger."""
    if not path.is_file() and path.exists():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    with path.open("rb") as file:
        content = file.read(min(max_bytes, path.stat().st_size) + 1)  # read() allocates what it is asked for
    if len(content) > max_bytes:
        raise ValueError(f"more than {max_bytes:,} bytes")
    return content


def read_json(path: Path, kind: type = object, *, max_bytes: int = MAX_JSON_BYTES, may_be_edited: bool = False) -> Any:
    """The values of a JSON file that anybody may have written.

    Raises the errors of `read_limited`, and ValueError if the file is no JSON, has a checksum that is not its content's (unless
    it `may_be_edited`), or has values of another `kind`.
    """
    content = read_limited(path, max_bytes)
    values = parse_json(content) if may_be_edited else parse_checked(content)
    if not isinstance(values, kind):
        raise ValueError(f"{type(values).__name__}, not {kind.__name__}")  # noqa: TRY004 - a fault of the file
    return values


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if the file is missing or can't be read."""
    try:
        return read_json(path, dict)
    except (OSError, ValueError):
        return None


def parse_json(text: str | bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The values of untrusted JSON, in UTF-8. Raises ValueError, also for more than MAX_JSON_DEPTH values inside each other."""
    try:
        values = json.loads(text if isinstance(text, str) else text.decode("utf-8"), object_hook=object_hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    level = [values]
    for _ in range(MAX_JSON_DEPTH):
        children = (child for value in level for child in (value.values() if isinstance(value, dict) else value))
        level = [child for child in children if isinstance(child, (dict, list))] if isinstance(values, (dict, list)) else []
        if not level:
            return values
    raise ValueError("nested too deeply")


def parse_checked(text: bytes) -> Any:
    """The values of JSON that may have a checksum, which is left out. Raises ValueError, also when it is another."""
    if is_damaged(text):
        raise ValueError("it has changed since it was written")
    values = parse_json(text)
    if isinstance(values, dict) and has_checksum(text):
        del values["checksum"]
    return values


def read_safetensors_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header of an open safetensors file, and the byte at which its tensors begin.

    Raises ValueError when it has none, or one with a tensor without dtype, shape and offsets.
    """
    length = int.from_bytes(file.read(8), "little")
    content = file.read(length) if length <= MAX_HEADER_BYTES else b""
    if not content or len(content) < length:
        raise ValueError("truncated, or no safetensors file")
    header = parse_json(content)
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")  # noqa: TRY004 - a fault of the file
    for name, entry in header.items():
        if name != "__metadata__" and not _is_tensor(entry):
            raise ValueError(f"its header has no dtype, shape and offsets of {name[:80]!r}")
    return header, 8 + length


def write_safetensors(path: Path, entries: Mapping[str, tuple[str, tuple[int, ...], int]], read: Callable[[str], Any]) -> None:
    """Write a safetensors file tensor by tensor: its library writes a whole file from memory.

    `entries`: dtype, shape and bytes of each tensor; `read` returns its bytes. Raises OSError when the disk is full. Format:
    https://github.com/huggingface/safetensors#format
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    encoded_header = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded_header += b" " * (-len(encoded_header) % 8)
    with path.open("wb") as output:
        output.write(len(encoded_header).to_bytes(8, "little") + encoded_header)
        for name in entries:
            output.write(read(name))


def _is_tensor(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        return False
    return all(type(size) is int and size >= 0 for size in (*shape, *offsets)) and offsets[0] <= offsets[1]


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is the short text that git-lfs leaves in its place. Raises OSError."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(23) == b"version https://git-lfs"


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file atomically: readers see the old content or the new. `durable`: also after a power cut.

    Raises OSError without room or permission; then nothing has changed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, values: Any, *, checksum: bool = False) -> None:
    """Replace a JSON file atomically and durably; the values of one with a `checksum` are a dict that is not empty."""
    text = json.dumps(values, indent=1, ensure_ascii=False)
    write_text(path, with_checksum(text) if checksum else text, durable=True)


def write_output(path: Path, text: str, *, new: bool = False) -> None:
    """Write a command's output file, whole or not at all, and remove the leftovers of a killed command.

    Raises DiskFull where it can't be written, and CommandError for a name that no file can have or, if `new`, that one has.
    """
    try:
        if new and path.exists():
            raise CommandError(f"{path} exists already", "Edit it, or delete or rename it first.")
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left_over(path)
        write_text(path, text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        wrong = f"{str(path)[:200]!r} can't be written: {reason}"
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            raise CommandError(wrong, "Give another name.") from None
        raise DiskFull(wrong, "Free some space, or choose a folder that you can write to.") from None


def remove_left_over(path: Path) -> None:
    """Remove what processes of this machine that were killed while they wrote a file left beside it. Raises OSError."""
    import psutil

    for left in path.parent.glob(f".{glob.escape(path.name)}.*.*"):
        writer = left.name.split(".")[-2]
        if writer.isdigit() and not psutil.pid_exists(int(writer)):
            left.unlink(missing_ok=True)


def existing_parent(path: Path) -> Path:
    """The path, or its nearest parent that exists; the working folder on a drive that does not."""
    return next((parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists()), Path.cwd())


def free_disk_bytes(path: Path) -> int:
    """Free bytes on the file system of `path`, which need not exist."""
    return shutil.disk_usage(existing_parent(path)).free


def sha256_of(path: Path) -> str:
    """The hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
