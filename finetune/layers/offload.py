"""Copies of tensors and saved activations to host memory and back, beside the computation."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from finetune.layers.host_memory import host_empty

#: Most bytes in flight, in multiples of the largest tensor so far: one tensor is copied while the next is computed.
WINDOW = 2


class InOrder:
    """Copies in order with the computation: on its stream, or directly on a CPU and in a forecast."""

    def copy(self, target: Tensor, source: Tensor, *, after: Any = None) -> Any:
        """Copy after the computation issued so far, or before the mark `after`. Return a handle for `wait`."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Any:
        """Return the current point in the computation."""

    def wait(self, handle: Any) -> None:
        """Make later computation wait for a copy."""

    def finish(self, handle: Any) -> None:
        """Block the host until a copy ends."""


class SideStream(InOrder):
    """Copies on a second CUDA stream, beside the current stream."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda, self._stream = device, cuda, cuda.Stream(device)

    def copy(self, target: Tensor, source: Tensor, *, after: Any = None) -> Any:
        # earlier kernels may still write the source, and still read what the target's memory held before
        if after is None:
            self._stream.wait_stream(self._cuda.current_stream(self._device))
        else:
            self._stream.wait_event(after)
        with self._cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, handle: Any) -> None:
        self._cuda.current_stream(self._device).wait_event(handle)

    def mark(self) -> Any:
        return self._cuda.current_stream(self._device).record_event()

    def finish(self, handle: Any) -> None:
        handle.synchronize()


#: One copy stream per device.
_side_stream = functools.cache(SideStream)


@dataclass(eq=False, slots=True, weakref_slot=True)
class OffloadedTensor:
    """A tensor in host memory, and back on its device from its first use in backward."""

    host: Tensor | None
    device: torch.device
    bytes: int
    on_device: Tensor | None = None
    #: Handle of the copy to the device.
    copy_back: Any = None


def offload_beside(device: torch.device) -> Offload:
    """Return an offload that overlaps with a device's computation."""
    on_cuda = device.type == "cuda"
    # on a CPU and in a forecast, copies are synchronous, and allocate as much
    return Offload(_side_stream(device) if on_cuda else InOrder(), pinned=on_cuda)


# Forward: the copy of a tensor starts when the tensor is complete, and the tensor stays on the GPU until the computation has
# waited for its copy. Backward: while one tensor is in use, the next ones are prefetched. `WINDOW` limits how far the copies
# may fall behind and run ahead. All device memory is allocated on the compute stream: one pool, in order.
class Offload:
    """Tensors of one micro-batch in host memory."""

    # window 0 keeps no copy in flight
    def __init__(self, copies: InOrder, *, pinned: bool, window: int = WINDOW) -> None:
        # no pool of pinned memory here: torch's caching host allocator reuses a freed block once the block's copies have ended
        # (aten/src/ATen/core/CachingHostAllocator.h)
        self._copies, self._pinned, self._window = copies, pinned, window
        self._largest = 0
        self._departing: deque[tuple[Tensor, Any]] = deque()
        self._offloaded: dict[int, weakref.ref[OffloadedTensor]] = {}  # by id, in order of saving
        self._prefetching: dict[int, OffloadedTensor] = {}

    def move(self, tensor: Tensor) -> OffloadedTensor:
        """Start a copy of `tensor` to the host."""
        host = host_empty(tensor, pinned=self._pinned)
        self._largest = max(self._largest, tensor.nbytes)
        self._departing.append((tensor, self._copies.copy(host, tensor)))
        self._free_copied(self._window * self._largest)
        return OffloadedTensor(host, tensor.device, tensor.nbytes)

    def note_saved(self, moved: OffloadedTensor) -> None:
        # backward loads tensors in reverse order of saving: a tensor that is saved again moves to the end
        self._offloaded.pop(id(moved), None)
        self._offloaded[id(moved)] = weakref.ref(moved)

    def load(self, moved: OffloadedTensor) -> Tensor:
        """Return the tensor on its device, and prefetch the tensors needed next."""
        self._free_copied(0)
        if moved.on_device is None:
            self._fetch(moved)
        if id(moved) in self._prefetching:
            self._wait_for(moved)
        self._prefetch()
        assert moved.on_device is not None
        return moved.on_device

    def close(self) -> None:
        self._free_copied(0)
        # no copy may write to memory that is freed after this
        for moved in list(self._prefetching.values()):
            self._wait_for(moved)
        self._offloaded.clear()

    def _free_copied(self, max_in_flight_bytes: int) -> None:
        while self._departing and sum(tensor.nbytes for tensor, _ in self._departing) > max_in_flight_bytes:
            _, handle = self._departing[0]
            self._copies.wait(handle)
            self._departing.popleft()

    def _fetch(self, moved: OffloadedTensor) -> None:
        assert moved.host is not None
        self._offloaded.pop(id(moved), None)
        moved.on_device = torch.empty(moved.host.shape, dtype=moved.host.dtype, device=moved.device)
        moved.copy_back = self._copies.copy(moved.on_device, moved.host)
        self._prefetching[id(moved)] = moved

    def _wait_for(self, moved: OffloadedTensor) -> None:
        self._copies.wait(moved.copy_back)
        moved.host = None
        del self._prefetching[id(moved)]

    def _prefetch(self) -> None:
        while self._offloaded:
            key = next(reversed(self._offloaded))
            moved = self._offloaded[key]()
            if moved is None:  # freed: backward has used it, or the graph is gone
                del self._offloaded[key]
            elif sum(tensor.bytes for tensor in self._prefetching.values()) + moved.bytes <= self._window * self._largest:
                self._fetch(moved)
            else:
                return


#: Smaller tensors stay as they are: a copy would cost more than it frees.
_MIN_BYTES = 4096


class _Handle(NamedTuple):
    moved: OffloadedTensor
    size: torch.Size
    #: None for a copy in the order of the tensor's elements.
    stride: tuple[int, ...] | None


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

    def _pack(self, tensor: Tensor) -> Tensor | _Handle:
        if not _is_activation(tensor):
            return tensor
        with torch.no_grad():
            return self._handle_for(tensor.detach())

    def _handle_for(self, tensor: Tensor) -> _Handle:
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
        return _Handle(moved, tensor.shape, tensor.stride() if is_whole else None)

    def _unpack(self, saved: Tensor | _Handle) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        loaded = self._offload.load(saved.moved)
        return loaded.view(saved.size) if saved.stride is None else loaded.as_strided(saved.size, saved.stride)


def _is_activation(tensor: Tensor) -> bool:
    """Return whether `tensor` is large and not a parameter, its view or its cast."""
    if not tensor.is_floating_point() or tensor.numel() * tensor.element_size() < _MIN_BYTES:
        return False
    base = tensor if tensor._base is None else tensor._base
    inputs = base.grad_fn.next_functions if base.grad_fn is not None else ()
    # autocast caches casts of parameters, so storing them elsewhere would free nothing
    only_input = getattr(inputs[0][0], "variable", None) if len(inputs) == 1 else None
    return not isinstance(base, torch.nn.Parameter) and not isinstance(only_input, torch.nn.Parameter)


def _is_non_overlapping_and_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
