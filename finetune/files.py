"""Files: cache folder, atomic writes, bounded reads, checksums, manifests of folders, free disk space, dataclasses as JSON."""

from __future__ import annotations

import dataclasses
import errno
import functools
import glob
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import Any, BinaryIO, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from finetune.errors import CommandError, DiskFull, FinetuneError
from finetune.system import WINDOWS, replace, sync_file, sync_folder

_CHECKSUM_PREFIX = b', "checksum": "'  # followed by eight hexadecimal digits, a quote and a brace
_CHECKSUM_BYTES = len(_CHECKSUM_PREFIX) + 10


def with_checksum(text: str) -> str:
    """Add the CRC-32 of a non-empty JSON object as its last key."""
    body = text.rstrip()[:-1].rstrip()  # without the closing brace
    return f'{body}{_CHECKSUM_PREFIX.decode()}{zlib.crc32(body.encode()):08x}"}}'


def has_checksum(text: bytes) -> bool:
    """Return whether a JSON object ends with a checksum."""
    return text[-_CHECKSUM_BYTES:-10] == _CHECKSUM_PREFIX


def is_damaged(text: bytes) -> bool:
    """Return whether a checksum exists and is wrong."""
    return has_checksum(text) and b"%08x" % zlib.crc32(text[:-_CHECKSUM_BYTES]) != text[-10:-2]


MAX_JSON_BYTES = 2**28  # the largest tokenizer.json has 40 MB
MAX_JSON_DEPTH = 100  # nested values: well below Python's recursion limit
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file: https://github.com/huggingface/safetensors#format
_LARGE_BYTES = 2**26  # reading fewer bytes takes less time than starting a process
#: Program of `sha256_in_subprocess`, at a low priority; Windows has no os.nice, so `abs` takes its place.
_PRINT_SHA256 = """import hashlib, os, sys
getattr(os, "nice", abs)(10)
print(hashlib.file_digest(open(sys.argv[1], "rb"), "sha256").hexdigest())"""
#: Phrases of error messages, and their fixes.
IS_LFS_POINTER, LFS_FIX = "is a pointer of git-lfs, not the file", "git lfs pull"
IS_GGUF = "is a GGUF file, which can't be trained"
GGUF_FIX = "Give the model that it was made from, and make a GGUF file of the result: finetune export RUN --to gguf"


def cache_dir() -> Path:
    """Return FINETUNE_CACHE, or `finetune` in the user's cache folder."""
    if folder := os.environ.get("FINETUNE_CACHE"):
        return Path(folder)
    windows_folder = os.environ.get("LOCALAPPDATA") if WINDOWS else None
    return Path(os.environ.get("XDG_CACHE_HOME") or windows_folder or Path.home() / ".cache") / "finetune"


def expanded(path_text: str) -> Path:
    """Expand `~` in a path."""
    # Path.expanduser raises RuntimeError for an unknown user
    return Path(os.path.expanduser(path_text))  # noqa: PTH111


def read_limited(path: Path, max_bytes: int) -> bytes:
    """Read a regular file. Raises OSError, or ValueError above `max_bytes`."""
    if not path.is_file() and path.exists():  # reading a FIFO would block
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    with path.open("rb") as file:
        content = file.read(min(max_bytes, path.stat().st_size) + 1)  # read(n) allocates n bytes
    if len(content) > max_bytes:
        raise ValueError(f"more than {max_bytes:,} bytes")
    return content


def read_json(path: Path, kind: type = object, *, may_be_edited: bool = False) -> Any:
    """Read a `kind` from an untrusted JSON file. Raises OSError or ValueError."""
    content = read_limited(path, MAX_JSON_BYTES)
    # an editor changes a file without renewing its checksum
    values = parse_json(content) if may_be_edited else parse_checked(content)
    if not isinstance(values, kind):
        raise ValueError(f"{type(values).__name__}, not {kind.__name__}")  # noqa: TRY004 - a fault of the file
    return values


def read_object(path: Path) -> dict[str, Any] | None:
    """Return a JSON file's object, or None if unreadable."""
    try:
        return read_json(path, dict)
    except (OSError, ValueError):
        return None


def parse_json(text: str | bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Parse untrusted JSON. Raises ValueError."""
    try:
        values = json.loads(text if isinstance(text, str) else text.decode("utf-8"), object_hook=object_hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if is_too_deep(values):
        raise ValueError("nested too deeply")
    return values


def is_too_deep(values: Any) -> bool:
    """Return whether JSON values are nested deeper than MAX_JSON_DEPTH."""
    level: Iterable[Any] = [values]  # all values at one depth
    for _ in range(MAX_JSON_DEPTH + 1):
        containers = [value for value in level if isinstance(value, (dict, list))]
        if not containers:
            return False
        level = (
            child for container in containers for child in (container.values() if isinstance(container, dict) else container)
        )
    return True


def parse_checked(text: bytes) -> Any:
    """Parse JSON; verify and drop its checksum. Raises ValueError."""
    if is_damaged(text):
        raise ValueError("it has changed since it was written")
    values = parse_json(text)
    if isinstance(values, dict) and has_checksum(text):
        del values["checksum"]
    return values


def read_safetensors_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """Return header entries by tensor name, and the data's offset in bytes. Raises ValueError."""
    length = int.from_bytes(file.read(8), "little")
    content = file.read(length) if length <= MAX_HEADER_BYTES else b""
    if not content or len(content) < length:
        raise ValueError("truncated, or no safetensors file")
    header = parse_json(content)
    if not isinstance(header, dict):
        raise ValueError("its header is not an object")  # noqa: TRY004 - a fault of the file
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not _is_header_entry(entry):
            raise ValueError(f"its header has no dtype, shape and offsets of {name[:80]!r}")
    return header, 8 + length


def write_safetensors(path: Path, entries: Mapping[str, tuple[str, tuple[int, ...], int]], read: Callable[[str], Any]) -> None:
    """Write a safetensors file tensor by tensor. `entries`: dtype, shape and bytes by name; `read` returns a tensor's data."""
    # safetensors' own writer needs all tensors in memory; format: https://github.com/huggingface/safetensors#format
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape, size_bytes) in entries.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size_bytes]}
        end += size_bytes
    encoded_header = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded_header += b" " * (-len(encoded_header) % 8)  # the data begins at a multiple of 8 bytes
    with path.open("wb") as output:
        output.write(len(encoded_header).to_bytes(8, "little") + encoded_header)
        for name in entries:
            output.write(read(name))


def _is_header_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not (isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        return False
    return all(type(size) is int and size >= 0 for size in (*shape, *offsets)) and offsets[0] <= offsets[1]


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is a git-lfs pointer. Raises OSError."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(23) == b"version https://git-lfs"


def write_text(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file atomically. Raises OSError."""
    # named after process and thread: `remove_left_over` removes the files of killed processes
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with temporary.open("w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            if durable:  # else a power failure can leave an empty file
                file.flush()
                os.fsync(file.fileno())
        replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, values: Any, *, checksum: bool = False) -> None:
    """Replace a JSON file atomically and durably."""
    text = json.dumps(values, indent=1, ensure_ascii=False)  # a checksum needs a non-empty object
    write_text(path, with_checksum(text) if checksum else text, durable=True)


def write_output(path: Path, text: str, *, must_be_new: bool = False) -> None:
    """Write a command's output file atomically. Raises DiskFull or CommandError."""
    try:
        if must_be_new and path.exists():
            raise CommandError(f"{path} exists already", "Edit it, or delete or rename it first.")
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_left_over(path)
        write_text(path, text)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = f"{str(path)[:200]!r} can't be written: {reason}"
        if isinstance(error, ValueError) or error.errno == errno.ENAMETOOLONG:
            raise CommandError(problem, "Give another name.") from None
        raise DiskFull(problem, "Free some space, or choose a folder that you can write to.") from None


def remove_left_over(path: Path) -> None:
    """Remove temporary files of killed processes."""
    import psutil

    for temporary in path.parent.glob(f".{glob.escape(path.name)}.*.*"):
        process_id = temporary.name.split(".")[-2]
        if process_id.isdigit() and not psutil.pid_exists(int(process_id)):
            temporary.unlink(missing_ok=True)


def existing_parent(path: Path) -> Path:
    """Return the path or its nearest existing parent."""
    # the working folder if even the drive is missing, on Windows
    return next((parent for parent in (path.absolute(), *path.absolute().parents) if parent.exists()), Path.cwd())


def free_disk_bytes(path: Path) -> int:
    """Return the free bytes on a path's file system."""
    return shutil.disk_usage(existing_parent(path)).free


def sha256_of(path: Path) -> str:
    """Return a file's hexadecimal SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_in_subprocess(path: Path) -> str:
    """Return a file's hexadecimal SHA-256, of a large file by another process."""
    # a thread that hashes gigabytes takes the interpreter's lock so often that a model loads ten times slower meanwhile
    if path.stat().st_size >= _LARGE_BYTES:
        command = [sys.executable, "-I", "-S", "-c", _PRINT_SHA256, str(path)]
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        if process.returncode == 0:
            return process.stdout.strip()
    return sha256_of(path)


MANIFEST = "MANIFEST.json"
#: Suffixes of files that libraries load: an added file is a change only with one of them.
_LOADED_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".json", ".py"}
_THREADS = 4


def write_manifest(folder: Path, values: dict[str, Any]) -> None:
    """Sync a folder's files, and last write their manifest with `values`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST)
    with ThreadPoolExecutor(1) as pool:  # hash while the disk syncs
        syncs = [pool.submit(sync_file, path) for path in paths]
        files = {
            path.relative_to(folder).as_posix(): {"sha256": sha256_of(path), "bytes": path.stat().st_size} for path in paths
        }
        for sync in syncs:
            sync.result()  # raises the error of the thread
    manifest = {**values, "files": files}
    write_text(folder / MANIFEST, json.dumps({**manifest, "seal": _seal_of(manifest)}, indent=1), durable=True)
    sync_folder(folder)


def changes_in(folder: Path, *, required: bool = True, only: str = "") -> list[str]:
    """Return a line for each changed, missing or added file, or for the file `only`; `required`: and for a missing manifest."""
    if not os.path.exists(folder / MANIFEST):  # noqa: PTH110
        return [f"its {MANIFEST} is missing"] if required else []
    manifest = read_object(folder / MANIFEST)
    if manifest is None or "seal" not in manifest:
        return ["its manifest can't be read"]
    if manifest.pop("seal") != _seal_of(manifest):
        return ["its manifest has changed since it was sealed"]
    files = {name: expected for name, expected in manifest["files"].items() if only in ("", name)}
    with ThreadPoolExecutor(_THREADS) as pool:
        changes = pool.map(lambda name: _change(folder / name, name, files[name]), files)
        problems = [change for change in changes if change]
    if only:  # skip the slow search for added files
        return problems
    present = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.suffix in _LOADED_SUFFIXES)
    return problems + [f"{name} is not in its manifest" for name in present if name not in files and name != MANIFEST]


def require_unchanged(folder: Path, kind: type[FinetuneError], fix: str, *, required: bool = True) -> None:
    """Raise `kind` if a folder differs from its manifest."""
    if changes := changes_in(folder, required=required):
        raise kind([f"{folder}: {change}" for change in changes[:5]], fix)


def _change(path: Path, name: str, expected: dict[str, Any]) -> str:
    if not path.is_file():
        return f"{name} is missing"
    if path.stat().st_size != expected["bytes"]:
        return f"{name} has {path.stat().st_size:,} bytes, not the {expected['bytes']:,} in the manifest"
    return f"{name} has changed since it was sealed" if sha256_of(path) != expected["sha256"] else ""


def _seal_of(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Convert dataclasses, pydantic models, collections and paths to JSON values."""
    if isinstance(value, float):  # JSON has no NaN or infinity: "nan", "inf" or "-inf", which `from_json` reads as a float
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [to_json(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, BaseModel):
        return to_json(value.model_dump(mode="json"))
    return str(value) if isinstance(value, PurePath) else value


def from_json(cls: type[T], values: Any) -> T:
    """Read a dataclass or type hint from `to_json` values. Raises ValueError."""
    try:  # ignores unknown keys: files of later versions may have them
        return _adapter(cls).validate_python(values)
    except ValidationError as error:
        raise ValueError("; ".join(map(_message, error.errors(include_url=False, include_context=False)))) from None


def read_json_as(path: Path, cls: type[T], key: str = "") -> T | None:
    """Read a `cls` from a JSON file or its `key`; None if unreadable."""
    values = read_object(path)
    try:
        return None if values is None else from_json(cls, values.get(key) if key else values)
    except ValueError:
        return None


def parse_leniently(cls: type[T], text: bytes) -> T | None:
    """Parse a JSON object without its invalid fields; None if unreadable."""
    try:
        return _adapter(cls).validate_json(text)
    except ValidationError as error:
        invalid = {fault["loc"][0] for fault in error.errors(include_url=False, include_context=False) if fault["loc"]}
    try:  # without the invalid fields, which get their defaults
        values = json.loads(text)
        return _adapter(cls).validate_python({name: value for name, value in values.items() if name not in invalid})
    except (ValueError, AttributeError, RecursionError):  # ValueError: pydantic's and json's
        return None


#: Cached: making an adapter takes about a millisecond.
_adapter: Callable[[Any], TypeAdapter[Any]] = functools.cache(TypeAdapter)


def _message(fault: Any) -> str:
    location = ".".join(str(part) for part in fault["loc"])
    return f"{location}: {fault['msg']}" if location else fault["msg"]
