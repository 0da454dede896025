"""A base model as it is trained, with its 4-bit weights, in one safetensors file: each decoder layer is one block of bytes.

The file has a tensor of bytes for each decoder layer (`layers.0`, ...) and one for everything else (`outside`). In a part the
matrices come first, each 4-bit one followed by its tables, then biases and norms. A tensor begins at a multiple of ALIGN, a
part at a multiple of PAGE, so that a part can be copied to a GPU, or read without the page cache, as it is. Each part's SHA-256
is in the metadata. A file gets its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from finetune.files import parse_json, read_safetensors_header
from finetune.layers.checkpointing import decoder_layers
from finetune.layers.host_memory import PAGE, round_up, tensor_offsets
from finetune.layers.quantised_files import unfinished
from finetune.system import read_at, replace, sync_folder

#: Raised when the layout changes: files of other versions are not read.
FORMAT = "finetune-1"
OUTSIDE = "outside"
#: Names of the code books, which all 4-bit weights share.
BOOKS = ("quant_map", "nested_quant_map")
_NESTED_BLOCK = 256
_CHUNK = 2**20
_THREADS = 4
_ZEROS = "0" * 64


class LayoutMismatch(Exception):
    """The layout of a file, or of what was loaded, is not that of the model that is built."""


class Damaged(LayoutMismatch):
    """A file is truncated, or a part of it has changed."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a part: of a parameter or buffer `name`, or (`table`) of a 4-bit weight's tables. `start`: its first byte."""

    name: str
    table: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def key(self) -> str:
        """`W.absmax` is 4-bit weight W's table."""
        return f"{self.name}.{self.table}" if self.table else self.name

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True)
class Part:
    """A decoder layer, or everything outside. `size` in bytes, a multiple of PAGE."""

    name: str
    entries: tuple[Entry, ...]
    size: int

    @property
    def parameters(self) -> set[str]:
        """Names of what a checkpoint has or the model computes, without tables and code books."""
        return {entry.name for entry in self.entries if not entry.table and entry.name not in BOOKS}


def parts_of(model: torch.nn.Module) -> tuple[Part, ...]:
    """The parts of a base model on meta: its decoder layers in order, then what is outside them; tied weights once."""
    paths = {module: path for path, module in model.named_modules()}
    taken: set[int] = set()

    def new(prefix: str, module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
        parameters = [(prefix + name, value) for name, value in module.named_parameters() if id(value) not in taken]
        taken.update(id(value) for _, value in parameters)
        return sorted(parameters, key=lambda pair: pair[1].dim() < 2)

    parts = [
        _layout(f"layers.{number}", _tensor_specs(new(f"{paths[layer]}.", layer)))
        for number, layer in enumerate(decoder_layers(model))
    ]
    outside = _tensor_specs(new("", model))
    outside += [(name, "", value.dtype, tuple(value.shape)) for name, value in _buffers_and_attributes(model)]
    if any(entry.table for part in parts for entry in part.entries) or any(table for _, table, *_ in outside):
        outside += [(name, "", torch.float32, (size,)) for name, size in zip(BOOKS, (16, 256), strict=True)]
    return (*parts, _layout(OUTSIDE, outside))


def _buffers_and_attributes(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers, and tensors that are plain attributes, such as rotary embeddings' frequencies."""
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


def _tensor_specs(parameters: list[tuple[str, torch.Tensor]]) -> list[tuple[str, str, torch.dtype, tuple[int, ...]]]:
    """Name, table, dtype and shape of each tensor that loaded parameters consist of."""
    from bitsandbytes.nn import Params4bit

    specs = []
    for name, value in parameters:
        if not isinstance(value, Params4bit):
            specs.append((name, "", value.dtype, tuple(value.shape)))
            continue
        # bitsandbytes.functional.quantize_4bit: two codes in a byte, a scale for each block, and scales of the scales
        storage, blocks = value.quant_storage, -(-value.numel() // value.blocksize)
        specs.append((name, "", storage, (-(-value.numel() // 2) // storage.itemsize, 1)))
        if not value.compress_statistics:
            specs.append((name, "absmax", torch.float32, (blocks,)))
            continue
        specs.append((name, "absmax", torch.uint8, (blocks,)))
        specs.append((name, "nested_offset", torch.float32, ()))
        specs.append((name, "nested_absmax", torch.float32, (-(-blocks // _NESTED_BLOCK),)))
    return specs


def _layout(name: str, tensors: list[tuple[str, str, torch.dtype, tuple[int, ...]]]) -> Part:
    sizes = [math.prod(shape) * dtype.itemsize for _, _, dtype, shape in tensors]
    starts, size = tensor_offsets(sizes)
    entries = (
        Entry(owner, table, str(dtype).removeprefix("torch."), shape, start)
        for (owner, table, dtype, shape), start in zip(tensors, starts, strict=True)
    )
    return Part(name, tuple(entries), size)


def file_bytes(parts: tuple[Part, ...]) -> int:
    """Bytes of the file of these parts, before any of it is written."""
    return _header_bytes(parts) + sum(part.size for part in parts)


def _header_bytes(parts: tuple[Part, ...]) -> int:
    """Bytes reserved for the header, which is written last."""
    weights = sum(entry.table == "absmax" for part in parts for entry in part.entries)
    return round_up(len(_header(parts, {}, {}, {})) + 256 * weights + 4096, PAGE)


def _header(parts: tuple[Part, ...], facts: Mapping[str, Any], hashes: Mapping[str, str], states: Mapping[str, Any]) -> bytes:
    layout = [
        [part.name, part.size, hashes.get(part.name, _ZEROS), [dataclasses.astuple(entry) for entry in part.entries]]
        for part in parts
    ]
    metadata = {"format": FORMAT, "facts": json.dumps(facts), "layout": json.dumps(layout), "states": json.dumps(states)}
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for part in parts:
        header[part.name] = {"dtype": "U8", "shape": [part.size], "data_offsets": [end, end + part.size]}
        end += part.size
    return json.dumps(header).encode()


class StoreWriter:
    """Writes a file's parts in any order; it gets its name when it is complete and on disk. A context: an error leaves no file.

    Raises OSError when the disk is full, LayoutMismatch for tensors that are not as the part says.
    """

    def __init__(self, path: Path, parts: tuple[Part, ...]) -> None:
        self.path, self.parts = path, parts
        self._header_bytes = _header_bytes(parts)
        self._offsets, end = {}, self._header_bytes
        for part in parts:
            self._offsets[part.name] = end
            end += part.size
        self._hashes: dict[str, str] = {}
        self._states: dict[str, dict[str, Any]] = {}
        self._books: dict[str, torch.Tensor] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._unfinished = unfinished(path, os.getpid())
        self._file = self._unfinished.open("wb")

    def __enter__(self) -> StoreWriter:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # a full disk, once more
            self._file.close()
        self._unfinished.unlink(missing_ok=True)

    def write(self, part: Part, values: Mapping[str, Any]) -> None:
        """Write the tensors of a part, and hash them. `values`: each parameter or buffer by its name, as loaded."""
        digest, end = hashlib.sha256(), 0
        self._file.seek(self._offsets[part.name])
        for entry in part.entries:
            tensor = self._tensor(entry, values)
            if str(tensor.dtype) != f"torch.{entry.dtype}" or tuple(tensor.shape) != entry.shape:
                raise LayoutMismatch(f"{entry.key} is {tensor.dtype} {tuple(tensor.shape)}, not {entry.dtype} {entry.shape}")
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            for piece in (bytes(entry.start - end), data):
                self._file.write(piece)
                digest.update(piece)
            end = entry.start + entry.size
        padding = bytes(part.size - end)
        self._file.write(padding)
        digest.update(padding)
        self._hashes[part.name] = digest.hexdigest()

    def _tensor(self, entry: Entry, values: Mapping[str, Any]) -> torch.Tensor:
        if entry.name in BOOKS:
            return self._books[entry.name]
        value = values[entry.name]
        state = getattr(value, "quant_state", None)
        if state is None:
            if entry.table:
                raise LayoutMismatch(f"{entry.name} was not quantised")
            return value
        if not entry.table:
            self._note_state(entry.name, state)
            return value.data
        tables = {"absmax": state.absmax, "nested_offset": state.offset}
        return state.state2.absmax if entry.table == "nested_absmax" else tables[entry.table]

    def _note_state(self, name: str, state: Any) -> None:
        """Record the fields of a quantisation state other than tables, and the code books."""
        facts: dict[str, Any] = {
            "shape": list(state.shape), "dtype": str(state.dtype).removeprefix("torch."), "blocksize": state.blocksize,
            "quant_type": state.quant_type,
        }  # fmt: skip
        books = {"quant_map": state.code}
        if state.nested:
            nested = state.state2
            facts |= {"nested_blocksize": nested.blocksize, "nested_dtype": str(nested.dtype).removeprefix("torch.")}
            books["nested_quant_map"] = state.state2.code
        self._states[name] = facts
        for book, code_book in books.items():
            if not torch.equal(self._books.setdefault(book, code_book.cpu()), code_book.cpu()):
                raise LayoutMismatch(f"{name} has another {book} than the weights before it")
        self._books.setdefault("nested_quant_map", torch.zeros(256))

    @property
    def missing(self) -> list[Part]:
        """Parts that are not written yet."""
        return [part for part in self.parts if part.name not in self._hashes]

    def finish(self, facts: Mapping[str, Any]) -> None:
        """Write the header, wait until all is on disk, and rename the file. `facts`: what it was computed from."""
        header = _header(self.parts, facts, self._hashes, self._states)
        assert not self.missing and len(header) <= self._header_bytes - 8
        self._file.seek(0)
        self._file.write((self._header_bytes - 8).to_bytes(8, "little") + header.ljust(self._header_bytes - 8))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        replace(self._unfinished, self.path)
        sync_folder(self.path.parent)


class Store:
    """A complete file, open for reading. Raises Damaged for one that is truncated or no such file, FileNotFoundError for none.

    An open file stays readable when another process replaces it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            raise Damaged(f"{path} is no file")
        self.file = path.open("rb")
        self._verified_stat = self._stat()
        try:
            header, data_begin = read_safetensors_header(self.file)
            metadata = header["__metadata__"]
            if metadata["format"] != FORMAT:
                raise Damaged(f"{path} is of another version")
            layout = parse_json(metadata["layout"])
            self.facts: dict[str, Any] = parse_json(metadata["facts"])
            self.states: dict[str, dict[str, Any]] = parse_json(metadata["states"])
            self.parts = tuple(
                Part(name, tuple(Entry(own, table, dtype, tuple(shape), at) for own, table, dtype, shape, at in entries), size)
                for name, size, _, entries in layout
            )
            self._hashes = {name: digest for name, _, digest, _ in layout}
            self._offsets = {part.name: data_begin + header[part.name]["data_offsets"][0] for part in self.parts}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise Damaged(f"{path} can't be read: {type(error).__name__}: {error}") from None
        self.size = data_begin + sum(part.size for part in self.parts)
        if os.fstat(self.file.fileno()).st_size != self.size:
            raise Damaged(f"{path} is cut off")

    def verify(self) -> None:
        """Hash every part. Raises Damaged, which names the first part that is not as it was written."""
        self._verified_stat = self._stat()
        with ThreadPoolExecutor(_THREADS) as pool:
            for part, digest in zip(self.parts, pool.map(self._hash, self.parts), strict=True):
                if digest != self._hashes[part.name]:
                    raise Damaged(f"{self.path}: {part.name} has changed since it was written")

    def require_unchanged(self) -> None:
        """Hash every part again if somebody has written to the file since it was opened or verified. Raises Damaged."""
        if self._stat() != self._verified_stat:
            self.verify()

    def _stat(self) -> tuple[int, int]:
        about = os.fstat(self.file.fileno())
        return about.st_size, about.st_mtime_ns

    def _hash(self, part: Part) -> str:
        digest, buffer, hashed_bytes = hashlib.sha256(), bytearray(min(_CHUNK, part.size)), 0
        while hashed_bytes < part.size:
            piece = memoryview(buffer)[: part.size - hashed_bytes]
            self._read(self._offsets[part.name] + hashed_bytes, piece)
            digest.update(piece)
            hashed_bytes += len(piece)
        return digest.hexdigest()

    def _read(self, begin: int, into: memoryview) -> None:
        if read_at(self.file.fileno(), begin, into) < len(into):
            raise Damaged(f"{self.path} is cut off")

    def byte_range(self, part: str) -> tuple[int, int]:
        """First byte in the file, and bytes, of a part."""
        return self._offsets[part], next(p.size for p in self.parts if p.name == part)

    def rows(self, part: Part, entry: Entry, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Rows of a tensor, read into memory of their own; all of it without `count`. The rest of the file is not read."""
        shape = entry.shape if count is None else (count, *entry.shape[1:])
        rows = torch.empty(shape, dtype=getattr(torch, entry.dtype))
        row = entry.size // entry.shape[0] if entry.shape and entry.shape[0] else 0
        if rows.numel():
            begin = self._offsets[part.name] + entry.start + first * row
            self._read(begin, rows.view(-1).view(torch.uint8).numpy().data)
        return rows

    def quant_state(self, name: str, tables: Mapping[str, torch.Tensor], books: Mapping[str, torch.Tensor]) -> Any:
        """bitsandbytes' QuantState of a weight, from its tables by their names and the code books."""
        from bitsandbytes.functional import QuantState

        facts = self.states[name]
        code, nested = books["quant_map"].clone(), None
        if "nested_absmax" in tables:
            nested = QuantState(
                absmax=tables["nested_absmax"], code=books["nested_quant_map"].clone(), blocksize=facts["nested_blocksize"],
                dtype=getattr(torch, facts["nested_dtype"]),
            )  # fmt: skip
        return QuantState(
            absmax=tables["absmax"], shape=torch.Size(facts["shape"]), code=code, blocksize=facts["blocksize"],
            quant_type=facts["quant_type"], dtype=getattr(torch, facts["dtype"]), offset=tables.get("nested_offset"),
            state2=nested,
        )  # fmt: skip
