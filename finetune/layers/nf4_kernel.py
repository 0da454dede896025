"""The Triton kernel that dequantises NF4 weights. Importing it needs Triton."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

#: Bytes of packed weights for each program.
_BYTES = 1024
# no fused products and sums: rounds as bitsandbytes does
_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
#: Triton compiles a separate kernel for pointers that are multiples of this.
_ALIGNED = 16
#: Compiled kernels by device, dtypes, size and constants: Triton's own lookup takes longer than the launch.
_compiled: dict[tuple[Any, ...], Any] = {}


@triton.jit
def _dequantise(  # noqa: ANN202 - Triton compiles it
    weight, absmax, scales, code, offset, levels, out, n_bytes, block: tl.constexpr, nested: tl.constexpr, size: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    packed = tl.load(weight + at, mask=at < n_bytes, other=0).to(tl.int32)
    number = at * 2 // block  # the block's number
    inside = at < n_bytes
    if nested:
        scale = tl.load(code + tl.load(absmax + number, mask=inside, other=0).to(tl.int32))
        # 256: `NESTED_BLOCK`
        scale = scale * tl.load(scales + number // 256, mask=inside, other=0.0) + tl.load(offset)
    else:
        scale = tl.load(absmax + number, mask=inside, other=0.0)
    values = tl.interleave(tl.load(levels + (packed >> 4)) * scale, tl.load(levels + (packed & 15)) * scale)
    position = tl.program_id(0).to(tl.int64) * (2 * size) + tl.arange(0, 2 * size)
    tl.store(out + position, values.to(out.dtype.element_ty), mask=position < 2 * n_bytes)


def dequantise(
    weight: torch.Tensor, absmax: torch.Tensor, nested: tuple[torch.Tensor, ...], levels: torch.Tensor, out: torch.Tensor,
    block: int,
) -> None:  # fmt: skip
    """Dequantise packed 4-bit weights into `out`. Each byte holds two weights, the first in the upper four bits.

    `nested`: scales, code book and offset of an 8-bit `absmax`; empty for an fp32 `absmax`.
    """
    n_bytes = out.numel() // 2
    scales, code, offset = nested or (absmax, absmax, absmax)
    tensors = (weight, absmax, scales, code, offset, levels, out)
    arguments = (*tensors, n_bytes, block, bool(nested), _BYTES)
    grid, key = (-(-n_bytes // _BYTES), 1, 1), (out.device, absmax.dtype, out.dtype, *arguments[7:10])
    # the compiled kernels below assume aligned pointers
    if sum([tensor.data_ptr() % _ALIGNED for tensor in tensors]):
        _dequantise[grid](*arguments, **_OPTIONS)
    elif kernel := _compiled.get(key):
        kernel[grid](*arguments)
    else:
        _compiled[key] = _dequantise[grid](*arguments, **_OPTIONS)
