"""Offload of saved activations to host memory, or their quantisation to int8, once per storage."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from finetune.layers.offload import Offload, OffloadedTensor

#: Smaller tensors stay as they are: a copy would cost more than it frees.
_MIN_BYTES = 4096
#: int8 values per fp32 scale: 1.03 bytes a value, about half of 16 bit, for slightly inexact gradients, as in GACT (Liu et al.,
#: 2022, arXiv 2206.11357). But rounding is to nearest, not stochastic, so that steps are reproducible to the bit.
BLOCK = 128
_LARGEST = torch.finfo(torch.float32).max
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False, slots=True)
class Int8Blocks:
    """A flat tensor as int8 codes with a scale per block."""

    #: (blocks, BLOCK).
    codes: torch.Tensor
    #: fp32 (blocks,).
    scales: torch.Tensor
    #: Number of values, without the padding of the last block.
    count: int
    dtype: torch.dtype


def quantise(values: torch.Tensor) -> Int8Blocks:
    """Return flat values as int8. Errors are at most 1/254 of the largest magnitude in a block."""
    count = values.numel()
    if count % BLOCK:
        values = torch.nn.functional.pad(values, (0, -count % BLOCK))
    blocks = values.view(-1, BLOCK)
    # without the clamp, one infinity would turn its block into NaN; with it, infinities become the largest float, the rest 0
    largest = torch.linalg.vector_norm(blocks, ord=float("inf"), dim=1).float().clamp_(_SMALLEST, _LARGEST)
    codes = (blocks * (127.0 / largest).unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8)
    return Int8Blocks(codes, largest / 127.0, count, values.dtype)


def dequantise(blocks: Int8Blocks) -> torch.Tensor:
    """Return the flat values in their original dtype."""
    return (blocks.codes * blocks.scales.unsqueeze(1)).to(blocks.dtype).view(-1)[: blocks.count]


def is_compressible(tensor: torch.Tensor) -> bool:
    """Return whether quantising `tensor` causes only small errors in the gradients."""
    # Tensors without a gradient (masks, rotary embeddings, attention's log-sum-exp) and per-token statistics stay exact: an
    # error would scale all values of a token. Statistics are narrow, or fp32 with at most two dimensions.
    if not (tensor.is_floating_point() and tensor.requires_grad and tensor.numel() >= 4096):
        return False
    return tensor.shape[-1] >= 32 and (tensor.dtype != torch.float32 or tensor.dim() > 2)


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Stored:
    """The stored form of a storage, or of one view, until backward."""

    #: Returns the flat values.
    restore: Callable[[], torch.Tensor]
    #: The tensors in host memory.
    moved: tuple[OffloadedTensor, ...] = ()


@dataclass(eq=False, frozen=True, slots=True)
class _Handle:
    stored: _Stored
    size: torch.Size
    stride: tuple[int, ...]


class SavedActivations(torch.autograd.graph.saved_tensors_hooks):
    """Context manager around forward and backward that offloads saved activations, quantises them to int8, or both."""

    def __init__(self, *, offload: Offload | None = None, int8: bool = False) -> None:
        self._offload, self._int8 = offload, int8
        # a storage that several operations save (the input of q, k and v) is stored once
        self._stored: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_Stored]]] = {}
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> SavedActivations:  # type: ignore[override]
        super().__enter__()
        return self

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)
        self._stored.clear()
        if self._offload is not None:
            self._offload.close()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Handle:
        compress = self._int8 and is_compressible(tensor)
        if not (compress or self._offload is not None) or not _is_activation(tensor):
            return tensor
        with torch.no_grad():
            return self._handle_for(tensor.detach(), compress)

    def _handle_for(self, tensor: torch.Tensor, compress: bool) -> _Handle:
        storage = tensor.untyped_storage()
        # Views of a whole storage differ only in shape and share one copy. Any other view gets a separate copy.
        is_whole = tensor.numel() * tensor.element_size() == storage.nbytes() and _is_non_overlapping_and_dense(tensor)
        view = () if is_whole else (tensor.storage_offset(), tensor.shape, tensor.stride())
        reference = StorageWeakRef(storage)
        key = (reference.cdata, tensor.dtype, tensor._version, compress, *view)
        entry = self._stored.get(key)
        stored = entry[1]() if entry is not None else None  # entry[0] keeps the storage's address from being reused
        if stored is None:
            flat = tensor.as_strided((tensor.numel(),), (1,), 0) if is_whole else tensor.reshape(-1)
            stored = self._store(flat, compress)
            self._stored[key] = (reference, weakref.ref(stored))
        if self._offload is not None:
            self._offload.note_saved(stored.moved)
        if is_whole:
            return _Handle(stored, tensor.shape, tensor.stride())
        contiguous_strides = tuple(math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.dim()))
        return _Handle(stored, tensor.shape, contiguous_strides)

    def _store(self, flat: torch.Tensor, compress: bool) -> _Stored:
        offload = self._offload
        if not compress:
            assert offload is not None
            moved = offload.move(flat)
            return _Stored(lambda: offload.load(moved), (moved,))
        blocks = quantise(flat)
        if offload is None:
            return _Stored(lambda: dequantise(blocks))
        codes, scales, count, dtype = offload.move(blocks.codes), offload.move(blocks.scales), blocks.count, blocks.dtype
        return _Stored(lambda: dequantise(Int8Blocks(offload.load(codes), offload.load(scales), count, dtype)), (codes, scales))

    @staticmethod
    def _unpack(saved: torch.Tensor | _Handle) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        return saved.stored.restore().as_strided(saved.size, saved.stride)


def _is_activation(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is large and not a parameter, its view or its cast."""
    if not tensor.is_floating_point() or tensor.numel() * tensor.element_size() < _MIN_BYTES:
        return False
    base = tensor if tensor._base is None else tensor._base
    inputs = base.grad_fn.next_functions if base.grad_fn is not None else ()
    # autocast caches casts of parameters, so storing them elsewhere would free nothing
    only_input = getattr(inputs[0][0], "variable", None) if len(inputs) == 1 else None
    return not isinstance(base, torch.nn.Parameter) and not isinstance(only_input, torch.nn.Parameter)


def _is_non_overlapping_and_dense(tensor: torch.Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
