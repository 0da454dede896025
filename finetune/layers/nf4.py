"""Dequantisation of 4-bit weights: a Triton kernel for NF4 on a GPU, bitsandbytes' operators elsewhere."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import bitsandbytes  # registers its operators
import torch
import torch.nn.functional as F  # noqa: N812

#: Scales in a block of nested scales, as bitsandbytes makes them.
NESTED_BLOCK = 256
#: Most tokens for which bitsandbytes has a kernel that multiplies with large 4-bit weights
#: (bitsandbytes/backends/cuda/ops.py, _gemm_4bit_use_custom_cuda).
_FEW_TOKENS = 512
_OPERATORS, _OWN = torch.ops.bitsandbytes, torch.ops.finetune
_LIBRARY = torch.library.Library("finetune", "FRAGMENT")
_WEIGHT = "Tensor weight, Tensor absmax, Tensor? scales, Tensor? code, Tensor? offset, int[] shape, str kind"
_LIBRARY.define(f"dequantise_4bit({_WEIGHT}, ScalarType dtype) -> Tensor")
_LIBRARY.define(f"product_of_few({_WEIGHT}, Tensor x, Tensor? bias) -> Tensor")


class Tables(NamedTuple):
    """Scales of a 4-bit weight."""

    #: absmax; with nested scales their 8-bit codes, and the absmax, code book and offset of these codes.
    tensors: tuple[torch.Tensor, ...]
    #: out, in, and weights in a block.
    shape: tuple[int, ...]
    #: nf4 or fp4.
    kind: str


def product_4bit(x: torch.Tensor, weight: torch.Tensor, tables: Tables, bias: torch.Tensor | None) -> torch.Tensor:
    """Return x @ W.T + bias for x (tokens, in) and a 4-bit W."""
    if x.shape[0] > _FEW_TOKENS:
        return F.linear(x, dequantised(weight, tables, x.dtype), bias)
    return _OWN.product_of_few(*_arguments(weight, tables), x, bias)


def dequantised(weight: torch.Tensor, tables: Tables, dtype: torch.dtype) -> torch.Tensor:
    """Return a 4-bit weight (out, in) in `dtype`."""
    first = tables.tensors[0]
    # not a forecast's tensor; an operator costs the host as much as the kernel does
    body: Callable[..., torch.Tensor] = _by_triton if type(first) is torch.Tensor and first.is_cuda else _OWN.dequantise_4bit
    return body(*_arguments(weight, tables), dtype)


def _arguments(weight: torch.Tensor, tables: Tables) -> tuple[Any, ...]:
    tensors, shape, kind = tables
    return weight, *tensors, *[None] * (4 - len(tensors)), shape, kind


def _product_of_few(
    weight: torch.Tensor, absmax: torch.Tensor, scales: Any, code: Any, offset: Any, shape: Sequence[int], kind: str,
    x: torch.Tensor, bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    *matrix, block = shape
    nested = {} if scales is None else {"absmax_8bit": absmax, "absmax_code": code, "absmax_offset": offset}
    first = absmax if scales is None else scales
    return _OPERATORS.gemm_4bit(x, weight, matrix, first, block, kind, bias, **nested)


def product_of_many(*arguments: Any) -> torch.Tensor:
    """Return the result of `product_of_few` by dequantising the whole weight."""
    # for forecasts: an upper bound, and examples of all lengths allocate alike
    *weight, x, bias = arguments
    return F.linear(x, _OWN.dequantise_4bit(*weight, x.dtype), bias)


def _by_bitsandbytes(
    weight: torch.Tensor, absmax: torch.Tensor, scales: Any, code: Any, offset: Any, shape: Sequence[int], kind: str,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    *matrix, block = shape
    if scales is not None:
        absmax = _OPERATORS.dequantize_blockwise(absmax, scales, code, NESTED_BLOCK, torch.float32).add_(offset)
    return _OPERATORS.dequantize_4bit(weight.view(-1, 1), absmax, block, kind, matrix, dtype)


def _by_triton(
    weight: torch.Tensor, absmax: torch.Tensor, scales: Any, code: Any, offset: Any, shape: Sequence[int], kind: str,
    dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    kernel = _kernel()
    if kernel is None or kind != "nf4" or weight.dtype != torch.uint8:
        return _by_bitsandbytes(weight, absmax, scales, code, offset, shape, kind, dtype)
    out = absmax.new_empty(shape[:2], dtype=dtype)
    kernel(weight, absmax, () if scales is None else (scales, code, offset), _levels(absmax.device), out, shape[2])
    return out


@functools.cache
def _kernel() -> Callable[..., None] | None:
    """Return the Triton kernel; None where Triton is missing or can't compile."""
    try:
        kernel = importlib.import_module("finetune.layers.nf4_kernel").dequantise
        device = torch.device("cuda")
        weight, absmax = (torch.zeros(32, dtype=kind, device=device) for kind in (torch.uint8, torch.float32))
        kernel(weight, absmax, (), _levels(device), torch.empty(64, dtype=torch.bfloat16, device=device), 64)
    except Exception:  # noqa: BLE001 - Triton, the compiler and the driver each have errors of their own
        return None
    return kernel


@functools.cache
def _levels(device: torch.device) -> torch.Tensor:
    return bitsandbytes.functional.get_4bit_type("nf4", device=device)


_LIBRARY.impl("dequantise_4bit", _by_bitsandbytes, "CPU")
_LIBRARY.impl("dequantise_4bit", _by_triton, "CUDA")
_LIBRARY.impl("product_of_few", _product_of_few, "CompositeExplicitAutograd")
torch.library.register_fake(
    "finetune::dequantise_4bit", lambda weight, *more: weight.new_empty(more[-3][:2], dtype=more[-1]), lib=_LIBRARY
)
torch.library.register_fake(
    "finetune::product_of_few", lambda *inputs: inputs[-2].new_empty(inputs[-2].shape[0], inputs[-4][0]), lib=_LIBRARY
)
