"""A base model with 4-bit weights, as a sealed folder of safetensors files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from bitsandbytes.functional import QuantState
from bitsandbytes.nn import Params4bit

from finetune.files import read_safetensors_header, write_safetensors
from finetune.layers.checkpointing import decoder_layers
from finetune.layers.host_memory import DTYPE_NAMES, DTYPES, bytes_of
from finetune.layers.nf4 import NESTED_BLOCK
from finetune.manifest import MANIFEST, changes_in
from finetune.system import read_at

#: Incremented when the layout changes: folders of other versions are not read.
FORMAT = "finetune-2"
#: The part beside the decoder layers. Each part is a file of parameters by name; the tables of a 4-bit weight, as bitsandbytes
#: packs them, are named `WEIGHT:absmax` and so on. The manifest has each file's SHA-256.
OUTSIDE = "outside"
_SUFFIX = ".safetensors"
#: Upper bounds: a tensor's entry in a header; code books, packed state and six entries of a 4-bit weight; the manifest.
_ENTRY_BYTES, _BOOKS_BYTES, _MANIFEST_BYTES = 256, 4096, 4096
#: Part of a model (`layers.0`, ..., `outside`) -> its tensors by their names.
Parts = dict[str, dict[str, torch.Tensor]]


class LayoutMismatch(Exception):
    """The layout of a folder or of loaded weights differs from the model."""


class Damaged(LayoutMismatch):
    """A folder is incomplete, or a file has changed."""


def parts_of(model: torch.nn.Module) -> Parts:
    """Return the parts of a base model: decoder layers in order, then other parameters and all buffers."""
    paths = {module: path for path, module in model.named_modules()}
    # tied weights are written once
    assigned: set[int] = set()

    def assign(prefix: str, module: torch.nn.Module) -> dict[str, torch.Tensor]:
        parameters: dict[str, torch.Tensor] = {
            prefix + name: value for name, value in module.named_parameters() if id(value) not in assigned
        }
        assigned.update(map(id, parameters.values()))
        return parameters

    parts = {f"layers.{number}": assign(f"{paths[layer]}.", layer) for number, layer in enumerate(decoder_layers(model))}
    return {**parts, OUTSIDE: assign("", model) | dict(_buffers_and_attributes(model))}


def _buffers_and_attributes(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}" if path else name, value


def needed_bytes(parts: Parts) -> int:
    """Return an upper bound of the bytes of a model's folder."""
    values = [value for part in parts.values() for value in part.values()]
    return sum(_ENTRY_BYTES + _stored_bytes(value) for value in values) + _MANIFEST_BYTES


def _stored_bytes(value: torch.Tensor) -> int:
    if not isinstance(value, Params4bit):
        return value.nbytes
    # as quantize_4bit of bitsandbytes: 2 weights a byte; fp32 absmax, or 8-bit absmax with an fp32 absmax per `NESTED_BLOCK`
    blocks = -(-value.numel() // value.blocksize)
    absmax_bytes = blocks + 4 * -(-blocks // NESTED_BLOCK) if value.compress_statistics else 4 * blocks
    return -(-value.numel() // 2) + absmax_bytes + _BOOKS_BYTES


def write_part(folder: Path, part: str, values: Mapping[str, torch.Tensor]) -> None:
    """Write a part's tensors. Raises OSError, LayoutMismatch."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        tensors[name] = value.detach()
        if isinstance(value, Params4bit):
            state: Any = value.quant_state
            if state is None:
                raise LayoutMismatch(f"{name} was not quantised")
            # the packed state contains the offset, too, but layer offloading reads each tensor from the file by itself
            tables = state.as_dict(packed=True) | ({"offset": state.offset} if state.nested else {})
            tensors |= {f"{name}:{table}": tensor for table, tensor in tables.items()}
    entries = {name: (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes) for name, tensor in tensors.items()}
    write_safetensors(folder / f"{part}{_SUFFIX}", entries, lambda name: bytes_of(tensors[name].cpu()))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in an open file."""

    file: BinaryIO
    file_offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Store:
    """A complete folder, open for reading. Raises FileNotFoundError, Damaged."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise FileNotFoundError(path)
        if not (path / MANIFEST).is_file():
            raise Damaged(f"{path} is incomplete")
        self.path = path
        self.tensors: dict[str, StoredTensor] = {}
        #: Names of the parameters and buffers by part, and of the tables by 4-bit weight.
        self.parts: dict[str, list[str]] = {}
        self.tables: dict[str, list[str]] = {}
        self._files: list[BinaryIO] = []
        for file in path.glob(f"*{_SUFFIX}"):
            try:
                self._open(file)
            except (OSError, ValueError, KeyError) as error:
                raise Damaged(f"{file} can't be read: {type(error).__name__}: {error}") from None
        self._verified_stat = self._stat()

    def _open(self, path: Path) -> None:
        # stays open: it can be read even after another process replaces the folder
        file = path.open("rb")
        self._files.append(file)
        header, data_begin = read_safetensors_header(file)
        for key, entry in header.items():
            begin, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            self.tensors[key] = StoredTensor(file, data_begin + begin, end - begin, DTYPES[entry["dtype"]], shape)
            name, _, table = key.partition(":")
            if table:
                self.tables.setdefault(name, []).append(table)
            else:
                self.parts.setdefault(path.name.removesuffix(_SUFFIX), []).append(name)

    def verify(self) -> None:
        """Hash every file. Raises Damaged."""
        self._verified_stat = self._stat()
        if changes := changes_in(self.path):
            raise Damaged(f"{self.path}: {changes[0]}")

    def require_unchanged(self) -> None:
        """Hash every file if any file was written to since the last check. Raises Damaged."""
        if self._stat() != self._verified_stat:
            self.verify()

    def _stat(self) -> list[tuple[int, int]]:
        stats = (os.fstat(file.fileno()) for file in self._files)
        return [(stat.st_size, stat.st_mtime_ns) for stat in stats]

    def rows(self, name: str, first: int = 0, count: int | None = None) -> torch.Tensor:
        """Read `count` rows of a tensor, or all, into new memory."""
        tensor = self.tensors[name]
        rows = torch.empty(tensor.shape if count is None else (count, *tensor.shape[1:]), dtype=tensor.dtype)
        if rows.numel():
            row_bytes = tensor.nbytes // tensor.shape[0] if tensor.shape else 0
            data = bytes_of(rows)
            if read_at(tensor.file.fileno(), tensor.file_offset + first * row_bytes, data) < len(data):
                raise Damaged(f"{tensor.file.name} is truncated")
        return rows

    def quant_state(self, name: str, device: torch.device | str | int) -> Any:
        """Return bitsandbytes' QuantState of a weight; None for an unquantised weight."""
        if name not in self.tables:
            return None
        # the offset is for `LayerOffloading` only: the packed state contains it, too
        tables = {table: self.rows(f"{name}:{table}") for table in self.tables[name] if table != "offset"}
        return QuantState.from_dict(tables, torch.device(device))
