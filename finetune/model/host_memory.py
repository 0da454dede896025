"""Tensors in host memory: pinned for copies to and from CUDA, and on meta in a forecast, where they are not device memory."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor


def is_forecast(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is fake or on meta: one of a forecast."""
    return isinstance(tensor, FakeTensor) or tensor.device.type == "meta"


def host_empty(like: torch.Tensor, dtype: torch.dtype | None = None, *, pinned: bool) -> torch.Tensor:
    """Uninitialised host memory of `like`'s shape. `pinned` needs CUDA and makes copies asynchronous.

    On `meta` for a forecast's tensor, so that it is not counted as device memory.
    """
    dtype = dtype or like.dtype
    if is_forecast(like):
        return torch.empty(like.shape, dtype=dtype, device="meta")
    return torch.empty(like.shape, dtype=dtype, device="cpu", pin_memory=pinned)
