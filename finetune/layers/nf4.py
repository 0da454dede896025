"""Dequantisation of 4-bit weights: a Triton kernel for NF4 on a GPU, bitsandbytes' operators elsewhere."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import bitsandbytes  # registers its operators
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

#: Values of absmax that share a nested scale in bitsandbytes.
NESTED_BLOCK = 256
#: bitsandbytes multiplies at most this many tokens with a large 4-bit weight without dequantising the whole weight
#: (bitsandbytes/backends/cuda/ops.py, _gemm_4bit_use_custom_cuda).
_FEW_TOKENS = 512
_BITSANDBYTES_OPS, _FINETUNE_OPS = torch.ops.bitsandbytes, torch.ops.finetune
_LIBRARY = torch.library.Library("finetune", "FRAGMENT")
#: Arguments of an operator for `QuantTables`, after absmax.
MORE_TABLES = "Tensor? nested_absmax, Tensor? nested_code, Tensor? offset, int[] shape_and_block, str quant_type"
_WEIGHT = f"Tensor weight, Tensor absmax, {MORE_TABLES}"
_LIBRARY.define(f"dequantise_4bit({_WEIGHT}, ScalarType dtype) -> Tensor")
_LIBRARY.define(f"few_token_linear({_WEIGHT}, Tensor x, Tensor? bias) -> Tensor")


class QuantTables(NamedTuple):
    """Quantisation tables of a 4-bit weight."""

    #: fp32 absmax; or with double quantisation: 8-bit absmax, nested absmax, nested code book and offset.
    tensors: tuple[Tensor, ...]
    #: out, in, weights per block.
    shape_and_block: tuple[int, ...]
    #: nf4 or fp4.
    quant_type: str

    def arguments(self) -> tuple[Any, ...]:
        """Return the tables as arguments of an operator."""
        return *self.tensors, *[None] * (4 - len(self.tensors)), self.shape_and_block, self.quant_type


def linear_4bit(x: Tensor, weight: Tensor, tables: QuantTables, bias: Tensor | None) -> Tensor:
    """Return x @ W.T + bias for x (tokens, in) and a 4-bit W."""
    if x.shape[0] > _FEW_TOKENS:
        return F.linear(x, dequantised(weight, tables, x.dtype), bias)
    return _FINETUNE_OPS.few_token_linear(weight, *tables.arguments(), x, bias)


def dequantised(weight: Tensor, tables: QuantTables, dtype: torch.dtype) -> Tensor:
    """Return a 4-bit weight (out, in) in `dtype`."""
    absmax = tables.tensors[0]
    # a plain tensor, not a forecast's: without the operator, whose dispatch takes the host as long as the kernel's launch
    is_on_gpu = type(absmax) is Tensor and absmax.is_cuda
    function: Callable[..., Tensor] = _by_triton if is_on_gpu else _FINETUNE_OPS.dequantise_4bit
    return function(weight, *tables.arguments(), dtype)


def _few_token_linear(*arguments: Any) -> Tensor:
    weight, absmax, nested_absmax, nested_code, offset, (*shape, block), quant_type, x, bias = arguments
    nested = {}
    if nested_absmax is not None:
        nested, absmax = {"absmax_8bit": absmax, "absmax_code": nested_code, "absmax_offset": offset}, nested_absmax
    return _BITSANDBYTES_OPS.gemm_4bit(x, weight, shape, absmax, block, quant_type, bias, **nested)


def dequantising_linear(*arguments: Any) -> Tensor:
    """Return the result of `few_token_linear` by dequantising the whole weight."""
    # for forecasts: an upper bound, and examples of all lengths allocate alike
    *weight, x, bias = arguments
    return F.linear(x, _FINETUNE_OPS.dequantise_4bit(*weight, x.dtype), bias)


def _by_bitsandbytes(
    weight: Tensor, absmax: Tensor, nested_absmax: Any, nested_code: Any, offset: Any,
    shape_and_block: Sequence[int], quant_type: str, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    *shape, block = shape_and_block
    if nested_absmax is not None:
        unnest = _BITSANDBYTES_OPS.dequantize_blockwise
        absmax = unnest(absmax, nested_absmax, nested_code, NESTED_BLOCK, torch.float32).add_(offset)
    return _BITSANDBYTES_OPS.dequantize_4bit(weight.view(-1, 1), absmax, block, quant_type, shape, dtype)


def _by_triton(*arguments: Any) -> Tensor:
    weight, absmax, *nested, (*shape, block), quant_type, dtype = arguments
    kernel = _kernel()
    if kernel is None or quant_type != "nf4" or weight.dtype != torch.uint8:
        return _by_bitsandbytes(*arguments)
    out = absmax.new_empty(shape, dtype=dtype)
    kernel(weight, absmax, () if nested[0] is None else tuple(nested), _nf4_values(absmax.device), out, block)
    return out


@functools.cache
def _kernel() -> Callable[..., None] | None:
    try:
        kernel = importlib.import_module("finetune.layers.nf4_kernel").dequantise
        device = torch.device("cuda")
        weight, absmax = (torch.zeros(32, dtype=dtype, device=device) for dtype in (torch.uint8, torch.float32))
        kernel(weight, absmax, (), _nf4_values(device), torch.empty(64, dtype=torch.bfloat16, device=device), 64)
    except Exception:  # noqa: BLE001 - Triton, the compiler and the driver each have errors of their own
        return None
    return kernel


@functools.cache
def _nf4_values(device: torch.device) -> Tensor:
    return bitsandbytes.functional.get_4bit_type("nf4", device=device)


_LIBRARY.impl("dequantise_4bit", _by_bitsandbytes, "CPU")
_LIBRARY.impl("dequantise_4bit", _by_triton, "CUDA")
_LIBRARY.impl("few_token_linear", _few_token_linear, "CompositeExplicitAutograd")
# the last arguments are: shape_and_block, quant_type, dtype; and for the second operator: shape_and_block, quant_type, x, bias
torch.library.register_fake(
    "finetune::dequantise_4bit", lambda weight, *args: weight.new_empty(args[-3][:2], dtype=args[-1]), lib=_LIBRARY
)
torch.library.register_fake(
    "finetune::few_token_linear", lambda *args: args[-2].new_empty(args[-2].shape[0], args[-4][0]), lib=_LIBRARY
)
