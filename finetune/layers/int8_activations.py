"""Blockwise int8 quantisation of saved activations: half the bytes of 16 bit, a quarter of 32 bit, slightly inexact gradients.

After GACT (Liu et al., 2022, arXiv 2206.11357), which compresses what autograd saves; here with one scale per 128 values and
round to nearest, so that steps are reproducible to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Values per fp32 scale: 1.03 bytes a value in all.
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
    """Flat floating-point values as int8; each error is at most 1/254 of the block's largest magnitude."""
    count = values.numel()
    if count % BLOCK:
        values = torch.nn.functional.pad(values, (0, -count % BLOCK))
    blocks = values.view(-1, BLOCK)
    # An infinite block maximum would turn the finite values into NaN; clamped, they become 0 and infinities the largest float.
    largest = torch.linalg.vector_norm(blocks, ord=float("inf"), dim=1).float().clamp_(_SMALLEST, _LARGEST)
    codes = (blocks * (127.0 / largest).unsqueeze(1)).round_().clamp_(-127, 127).to(torch.int8)
    return Int8Blocks(codes, largest / 127.0, count, values.dtype)


def dequantise(blocks: Int8Blocks) -> torch.Tensor:
    """The flat values, in their original dtype."""
    return (blocks.codes * blocks.scales.unsqueeze(1)).to(blocks.dtype).view(-1)[: blocks.count]


def is_compressible(tensor: torch.Tensor) -> bool:
    """Whether `tensor` can be quantised with only small errors in the gradients.

    True for large inputs that need a gradient. Tensors without one (masks, rotary embeddings, attention's log-sum-exp) and
    per-token statistics stay exact: an error there would scale whole rows.
    """
    if not (tensor.is_floating_point() and tensor.requires_grad and tensor.numel() >= 4096):
        return False
    per_token_statistic = tensor.shape[-1] < 32 or (tensor.dtype == torch.float32 and tensor.dim() < 3)
    return not per_token_statistic
