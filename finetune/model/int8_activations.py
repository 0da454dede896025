"""Saved activations as blockwise int8: about half of 16 bit and a quarter of 32 bit, for gradients that are slightly off.

In the spirit of GACT (Liu et al., 2022, arXiv 2206.11357), which compresses whatever autograd keeps; here with one
scale per 128 values and round to nearest, so that a step can be repeated to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Values that share one fp32 scale: 1.03 bytes a value in all.
BLOCK = 128
_LARGEST = torch.finfo(torch.float32).max
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, eq=False, slots=True)
class Int8Blocks:
    """`codes` int8 (blocks, BLOCK) and `scales` fp32 (blocks,); `count` values of `dtype`, the rest of the last block is 0."""

    codes: torch.Tensor
    scales: torch.Tensor
    count: int
    dtype: torch.dtype


def quantise(values: torch.Tensor) -> Int8Blocks:
    """Flat floating values as int8. The error of each is at most 1/254 of the largest magnitude in its block."""
    count = values.numel()
    if count % BLOCK:
        values = torch.nn.functional.pad(values, (0, -count % BLOCK))
    blocks = values.view(-1, BLOCK)
    # An infinite block maximum would turn the finite values into NaN; clamped, they become 0 and infinities the largest float.
    largest = torch.linalg.vector_norm(blocks, ord=float("inf"), dim=1).float().clamp_(_SMALLEST, _LARGEST)
    codes = (blocks * (127.0 / largest).unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8)
    return Int8Blocks(codes, largest / 127.0, count, values.dtype)


def dequantise(blocks: Int8Blocks) -> torch.Tensor:
    """The flat values again, in their dtype."""
    return (blocks.codes * blocks.scales.unsqueeze(1)).to(blocks.dtype).view(-1)[: blocks.count]


def is_compressible(tensor: torch.Tensor) -> bool:
    """Whether rounding `tensor` only blurs a gradient.

    True for the large differentiable inputs that operations keep. What needs no gradient itself (masks, rotary tables,
    log-sum-exp of attention) and per-token statistics stay exact: an error there would scale whole rows.
    """
    if not (tensor.is_floating_point() and tensor.requires_grad and tensor.numel() >= 4096):
        return False
    per_token_statistic = tensor.shape[-1] < 32 or (tensor.dtype == torch.float32 and tensor.dim() < 3)
    return not per_token_statistic
