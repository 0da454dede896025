"""Surroundings of a dry run: fake tensors, CUDA's code paths, and a fast reference of delta nets for long rows."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from finetune.compat.bitsandbytes import own_quantisation_maps
from finetune.compat.torch import fake_tensor_mode
from finetune.compat.transformers import fake_experts, replaced_kernels, without_packing_detection
from finetune.memory.card_semantics import CudaFunctions, card_semantics
from finetune.memory.rules import Capability
from finetune.model.hybrid import takes_reference

#: Chunks of the reference's loop in a dry run. Fewer chunks would change its peak.
CHUNKS = 4


@contextmanager
def fake_tensors(
    model: Any, capability: Capability | None, trained_tokens: int, packed: bool
) -> Iterator[CudaFunctions | None]:
    """Make tensors fake and run `model` as on a GPU of this compute capability, or on the CPU (None)."""
    semantics = None
    with ExitStack() as stack:
        stack.enter_context(own_quantisation_maps())
        stack.enter_context(fake_experts())
        stack.enter_context(replaced_kernels(model, functools.partial(_forecast, capability)))
        if capability is not None and sys.platform != "win32":
            semantics = stack.enter_context(card_semantics(trained_tokens))
        if not packed:
            stack.enter_context(without_packing_detection())
        stack.enter_context(fake_tensor_mode())
        yield semantics


def _forecast(capability: Capability | None, function: Any, facts: dict[str, Any], *inputs: Any, **named: Any) -> Any:
    if facts["is_new_implementation"] and not takes_reference(facts["package"], capability):
        return function(*inputs, **named)
    folds = facts["func_name"] == "chunk_gated_delta_rule" and torch.is_autocast_enabled("cpu")
    return (functools.partial(_folded, function.__wrapped__) if folds else function.__wrapped__)(*inputs, **named)


def _folded(rule: Any, query: Any, key: Any, value: Any, *, g: Any, beta: Any, chunk_size: int = 64, **named: Any) -> Any:
    """Call `rule` with chunks of a row as heads: the same bytes in a loop of about `CHUNKS` steps."""
    # the reference's Python loop over chunks would make long rows slow
    batch, tokens, heads, width = key.shape
    chunks = -(-tokens // chunk_size)
    least = CHUNKS if torch.is_grad_enabled() else 4 * CHUNKS  # a forward pass alone peaks within a step
    steps = next((steps for steps in range(least, chunks) if batch * heads * chunks % steps == 0), chunks)
    length, rows = -(-tokens * steps // chunks), batch * chunks / steps
    folded = [x[:1, :1, :1].expand(1, length, round(x.shape[2] * rows), *x.shape[3:]) for x in (query, key, value, g, beta)]
    out, state = rule(*folded[:3], g=folded[3], beta=folded[4], chunk_size=chunk_size, **named)
    out = out.flatten()[: value.numel()].view(value.shape)
    if out.requires_grad:
        # the first and the last step save less, the more heads a step has; the peak is in the second step
        heads_more, depth, ballast = round((rows - batch) * value.shape[2]), value.shape[3], list[torch.Tensor]()
        peak = 8 * width * depth + 22 * chunk_size * width - 4 * chunk_size**2
        out.register_hook(lambda _: ballast.append(torch.empty(peak * heads_more, dtype=torch.uint8)))
        next(tensor for tensor in folded if tensor.requires_grad).register_hook(lambda _: ballast.clear())
        out = _Saved.apply(out, (4 * width * depth + 6 * chunk_size * width + 2 * chunk_size * depth) * heads_more)
    return out, state


class _Saved(torch.autograd.Function):
    """Save `size` bytes for the backward of a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(size, dtype=torch.uint8))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
