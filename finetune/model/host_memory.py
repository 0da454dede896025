"""Tensors in host memory: pinned where a CUDA device copies from and to them, and off the card's books in a forecast."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor


def is_forecast(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has a size but no data: the forecast's stand-in for a tensor of the card."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def host_empty(like: torch.Tensor, dtype: torch.dtype | None = None, *, pinned: bool) -> torch.Tensor:
    """Uninitialised host memory of `like`'s shape. `pinned` needs CUDA and lets copies to and from it run by themselves.

    For a forecast's tensor it is on `meta`, so that whoever adds up the card's bytes can tell the two apart.
    """
    dtype = dtype or like.dtype
    if is_forecast(like):
        return torch.empty(like.shape, dtype=dtype, device="meta")
    return torch.empty(like.shape, dtype=dtype, device="cpu", pin_memory=pinned)


def to_host(tensor: torch.Tensor, *, pinned: bool) -> torch.Tensor:
    """A copy in host memory. From CUDA to pinned memory it is only enqueued; the stream keeps the order."""
    copy = host_empty(tensor, pinned=pinned)
    copy.copy_(tensor, non_blocking=True)
    return copy


def to_device(copy: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`copy` back on `device`, in memory of its own. To CUDA it is only enqueued."""
    return torch.empty(copy.shape, dtype=copy.dtype, device=device).copy_(copy, non_blocking=True)
