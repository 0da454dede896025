"""Moves tensors to host memory and back, on CUDA by a stream beside the computation.

Forward: the copy of a tensor starts when the tensor is complete, and the tensor stays on the card until the computation has
waited for its copy. Backward: while one tensor is in use, those needed next are on their way back. How far the copies may fall
behind and run ahead is `WINDOW`. All device memory is allocated on the compute stream: one pool, in order.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from finetune.model.host_memory import host_empty

#: Bytes on their way, in units of the largest tensor moved so far: one being copied and one being computed.
WINDOW = 2


class Copies(Protocol):
    """Copies between card and host, and the order between them and the computation."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Any = None) -> Any:
        """Copy after all computation issued so far, or before `mark` gave `after`; returns what `wait` takes."""

    def mark(self) -> Any:
        """This place in the computation."""

    def wait(self, copied: Any) -> None:
        """Let all computation issued from now on begin after that copy."""

    def finish(self, copied: Any) -> None:
        """Wait here for the end of that copy."""


class InOrder:
    """Copies in order with the computation: on its stream, or at once on a CPU and in a forecast."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: None = None) -> None:
        """Copy on the current stream; asynchronous for the host when the host memory is pinned."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> None:
        """Copies are made in order anyway."""

    def wait(self, copied: None) -> None:
        """Nothing to wait for."""

    def finish(self, copied: None) -> None:
        """Nothing to wait for: host memory is not used again."""


class SideStream:
    """Copies on a CUDA stream of their own, which overlap with computation on the current stream. `cuda` is torch.cuda."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda, self._stream = device, cuda, cuda.Stream(device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, *, after: Any = None) -> Any:
        """Copy after all that the current stream has been given, or up to an event; returns the event of its end.

        The wait covers both the source's values and the target's memory, which earlier kernels may still use.
        """
        if after is None:
            self._stream.wait_stream(self._cuda.current_stream(self._device))
        else:
            self._stream.wait_event(after)
        with self._cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def wait(self, copied: Any) -> None:
        """The current stream waits for the event; the host does not."""
        self._cuda.current_stream(self._device).wait_event(copied)

    def mark(self) -> Any:
        """An event behind all that the current stream has been given."""
        return self._cuda.current_stream(self._device).record_event()

    def finish(self, copied: Any) -> None:
        """The host waits for the event."""
        copied.synchronize()


@functools.cache
def side_stream(device: torch.device) -> SideStream:
    """The process's copy stream of a CUDA device."""
    return SideStream(device)


@dataclass(eq=False, slots=True, weakref_slot=True)
class Moved:
    """One tensor in host memory, and on the card again from its first use in backward on."""

    host: torch.Tensor | None
    device: torch.device
    bytes: int
    here: torch.Tensor | None = None
    copied: Any = None


def offload_beside(device: torch.device) -> Offload:
    """Offload from a device, beside its computation; for a forecast and a CPU the same memory, with copies at once."""
    on_cuda = device.type == "cuda"
    return Offload(side_stream(device) if on_cuda else InOrder(), pinned=on_cuda)


def offload_in_order(*, pinned: bool) -> Offload:
    """Offload by the compute stream itself, with nothing in flight: for a few tensors, whose copies take little time."""
    return Offload(InOrder(), pinned=pinned, window=0)


class Offload:
    """Tensors of one micro-batch in host memory. `copies` makes the copies; `window` 0 keeps none in flight.

    Pinned host memory is reused: torch's caching host allocator gives a freed block out again once the events of the copies
    that it took part in have passed (aten/src/ATen/core/CachingHostAllocator.h).
    """

    def __init__(self, copies: Copies, *, pinned: bool, window: int = WINDOW) -> None:
        self._copies, self._pinned, self._window = copies, pinned, window
        self._largest = 0
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()
        self._away: dict[int, weakref.ref[Moved]] = {}  # by last use in forward, which is the first in backward
        self._coming: dict[int, Moved] = {}

    def move(self, tensor: torch.Tensor) -> Moved:
        """Start a copy of `tensor` to the host."""
        moved = Moved(host_empty(tensor, pinned=self._pinned), tensor.device, tensor.nbytes)
        assert moved.host is not None
        self._largest = max(self._largest, moved.bytes)
        self._leaving.append((tensor, self._copies.copy(moved.host, tensor)))
        self._let_go(self._window * self._largest)
        return moved

    def used(self, parts: tuple[Moved, ...]) -> None:
        """Note a use in forward: backward needs what is used last first."""
        for moved in parts:
            self._away.pop(id(moved), None)
            self._away[id(moved)] = weakref.ref(moved)

    def back(self, moved: Moved) -> torch.Tensor:
        """The tensor on its device, for computation issued from now on; starts the copies of those that are needed next."""
        self._let_go(0)
        if moved.here is None:
            self._fetch(moved)
        if id(moved) in self._coming:
            self._arrive(moved)
        self._fetch_next()
        assert moved.here is not None
        return moved.here

    def close(self) -> None:
        """Wait for all copies: memory freed after this is not written to."""
        self._let_go(0)
        for moved in list(self._coming.values()):
            self._arrive(moved)
        self._away.clear()

    def _let_go(self, most_bytes: int) -> None:
        """Free the tensors that have been copied longest, until at most so many bytes are left."""
        while self._leaving and sum(tensor.nbytes for tensor, _ in self._leaving) > most_bytes:
            _, copied = self._leaving[0]
            self._copies.wait(copied)
            self._leaving.popleft()

    def _fetch(self, moved: Moved) -> None:
        assert moved.host is not None
        self._away.pop(id(moved), None)
        moved.here = torch.empty(moved.host.shape, dtype=moved.host.dtype, device=moved.device)
        moved.copied = self._copies.copy(moved.here, moved.host)
        self._coming[id(moved)] = moved

    def _arrive(self, moved: Moved) -> None:
        self._copies.wait(moved.copied)
        moved.host = None
        del self._coming[id(moved)]

    def _fetch_next(self) -> None:
        while self._away:
            key = next(reversed(self._away))
            moved = self._away[key]()
            if moved is None:  # its backward has run, or never will
                del self._away[key]
            elif sum(each.bytes for each in self._coming.values()) + moved.bytes <= self._window * self._largest:
                self._fetch(moved)
            else:
                return
