"""The Triton kernel that dequantises NF4 weights. Importing it needs Triton."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

#: Bytes of packed weights that each program of the kernel dequantises.
_PROGRAM_BYTES = 1024
# no fused multiply-adds, so that values are rounded as in bitsandbytes
_OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
#: Triton compiles a separate kernel for pointers that are multiples of this.
_ALIGNMENT = 16
#: Compiled kernels by device, dtypes, size and constants: Triton's own lookup takes longer than the launch.
_compiled: dict[tuple[Any, ...], Any] = {}


@triton.jit
def _dequantise(  # noqa: ANN202 - Triton compiles it
    weight, absmax, nested_absmax, nested_code, offset, nf4_values, out, n_bytes, block: tl.constexpr,
    is_nested: tl.constexpr, program_bytes: tl.constexpr,
):  # fmt: skip
    byte_index = tl.program_id(0).to(tl.int64) * program_bytes + tl.arange(0, program_bytes)
    inside = byte_index < n_bytes
    packed = tl.load(weight + byte_index, mask=inside, other=0).to(tl.int32)
    block_index = byte_index * 2 // block
    if is_nested:
        scale = tl.load(nested_code + tl.load(absmax + block_index, mask=inside, other=0).to(tl.int32))
        # 256: `NESTED_BLOCK`
        scale = scale * tl.load(nested_absmax + block_index // 256, mask=inside, other=0.0) + tl.load(offset)
    else:
        scale = tl.load(absmax + block_index, mask=inside, other=0.0)
    values = tl.interleave(tl.load(nf4_values + (packed >> 4)) * scale, tl.load(nf4_values + (packed & 15)) * scale)
    out_index = tl.program_id(0).to(tl.int64) * (2 * program_bytes) + tl.arange(0, 2 * program_bytes)
    tl.store(out + out_index, values.to(out.dtype.element_ty), mask=out_index < 2 * n_bytes)


def dequantise(weight: Tensor, absmax: Tensor, nested: tuple[Tensor, ...], nf4_values: Tensor, out: Tensor, block: int) -> None:
    """Dequantise packed 4-bit weights into `out`. Each byte holds two weights, the first in the upper four bits.

    `nested`: absmax, code book and offset of an 8-bit `absmax`; empty for an fp32 `absmax`.
    """
    n_bytes = out.numel() // 2
    # without nested scales the kernel ignores the three placeholders
    tensors = (weight, absmax, *(nested or (absmax, absmax, absmax)), nf4_values, out)
    constants = (n_bytes, block, bool(nested))
    arguments = (*tensors, *constants, _PROGRAM_BYTES)
    grid, key = (-(-n_bytes // _PROGRAM_BYTES), 1, 1), (out.device, absmax.dtype, out.dtype, *constants)
    # the compiled kernels below assume aligned pointers
    if sum([tensor.data_ptr() % _ALIGNMENT for tensor in tensors]):  # a generator takes longer
        _dequantise[grid](*arguments, **_OPTIONS)
    elif kernel := _compiled.get(key):
        # `kernel[grid](*arguments)` would also describe the launch for profilers, which takes as long as the launch
        stream = triton.runtime.driver.active.get_current_stream(out.get_device())
        kernel.run(*grid, stream, kernel.function, kernel.packed_metadata, None, None, None, *arguments)
    else:
        _compiled[key] = _dequantise[grid](*arguments, **_OPTIONS)
