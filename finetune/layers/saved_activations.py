"""Offload of saved activations to host memory, once per storage."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from finetune.layers.offload import Offload, OffloadedTensor

#: Smaller tensors stay as they are: a copy would cost more than it frees.
_MIN_BYTES = 4096


@dataclass(eq=False, frozen=True, slots=True)
class _Handle:
    moved: OffloadedTensor
    size: torch.Size
    stride: tuple[int, ...]


class SavedActivations(torch.autograd.graph.saved_tensors_hooks):
    """Context manager around forward and backward that offloads saved activations."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        # a storage that several operations save (the input of q, k and v) is stored once
        self._stored: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[OffloadedTensor]]] = {}
        super().__init__(self._pack, self._unpack)

    def __enter__(self) -> SavedActivations:  # type: ignore[override]
        super().__enter__()
        return self

    def __exit__(self, *arguments: Any) -> None:
        super().__exit__(*arguments)
        self._stored.clear()
        self._offload.close()

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | _Handle:
        if not _is_activation(tensor):
            return tensor
        with torch.no_grad():
            return self._handle_for(tensor.detach())

    def _handle_for(self, tensor: torch.Tensor) -> _Handle:
        storage = tensor.untyped_storage()
        # Views of a whole storage differ only in shape and share one copy. Any other view gets a separate copy.
        is_whole = tensor.numel() * tensor.element_size() == storage.nbytes() and _is_non_overlapping_and_dense(tensor)
        view = () if is_whole else (tensor.storage_offset(), tensor.shape, tensor.stride())
        reference = StorageWeakRef(storage)
        key = (reference.cdata, tensor.dtype, tensor._version, *view)
        entry = self._stored.get(key)
        moved = entry[1]() if entry is not None else None  # entry[0] keeps the storage's address from being reused
        if moved is None:
            moved = self._offload.move(tensor.as_strided((tensor.numel(),), (1,), 0) if is_whole else tensor.reshape(-1))
            self._stored[key] = (reference, weakref.ref(moved))
        self._offload.note_saved(moved)
        if is_whole:
            return _Handle(moved, tensor.shape, tensor.stride())
        contiguous_strides = tuple(math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.dim()))
        return _Handle(moved, tensor.shape, contiguous_strides)

    def _unpack(self, saved: torch.Tensor | _Handle) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        return self._offload.load(saved.moved).as_strided(saved.size, saved.stride)


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
