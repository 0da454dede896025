"""The smallest Triton kernel: compiling and running it needs all that Triton needs. Imported only where there is a card."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(values, count, block: tl.constexpr):
    places = tl.program_id(0) * block + tl.arange(0, block)
    inside = places < count
    tl.store(values + places, tl.load(values + places, mask=inside) + 1, mask=inside)


def add_one_works() -> bool:
    """True when the compiled kernel adds one to each of a thousand numbers."""
    values = torch.arange(1000, device="cuda", dtype=torch.float32)
    _add_one[(4,)](values, 1000, block=256)
    return bool((values == torch.arange(1, 1001, device="cuda", dtype=torch.float32)).all())
