"""Tensors in host memory: pinned for copies to and from CUDA, on meta in a forecast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from finetune.errors import RecipeError

#: Host memory is pinned in whole pages.
PAGE = 4096


def round_up(size: int, unit: int) -> int:
    """Return `size` rounded up to a multiple of `unit`."""
    return -(-size // unit) * unit


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory."""
    array: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def is_in_forecast(tensor: Tensor) -> bool:
    """Return whether `tensor` belongs to a forecast: is fake, functional or on meta."""
    # functional: while a forecast splits a compiled layer into forward and backward
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or tensor.device.type == "meta"


def host_empty(like: Tensor, dtype: torch.dtype | None = None, *, pinned: bool) -> Tensor:
    """Return uninitialised host memory in the shape of `like`. `pinned` needs CUDA."""
    dtype = dtype or like.dtype
    if is_in_forecast(like):
        # so that it is not counted as device memory
        return torch.empty(like.shape, dtype=dtype, device="meta")
    return torch.empty(like.shape, dtype=dtype, device="cpu", pin_memory=pinned)


def host_buffer(n_bytes: int, like: Tensor) -> Tensor:
    """Return `n_bytes` bytes that are never freed, pinned for CUDA. Raises RecipeError if the system refuses."""
    if is_in_forecast(like):
        return torch.empty(n_bytes, dtype=torch.uint8, device="meta")
    if not like.is_cuda:
        return torch.empty(n_bytes, dtype=torch.uint8)
    # pinned directly: torch's allocator of pinned memory would round 430 MB up to 512 MB
    unaligned = torch.empty(n_bytes + PAGE, dtype=torch.uint8)
    buffer = unaligned[-unaligned.data_ptr() % PAGE :][:n_bytes]
    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), n_bytes, 0)
    if int(error):
        raise RecipeError(
            f"{n_bytes:,} bytes of host memory can't be pinned for an offloaded layer: CUDA error {int(error)}",
            "Free host memory or raise its limit (ulimit -l), offload fewer layers, or set layer_offloading=nvme.",
        )
    return buffer
