"""Forward and backward of a mixture's 4-bit experts: only experts with rows are dequantised."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise
from torch.autograd.function import once_differentiable
from transformers.integrations import moe

from finetune.compat.transformers import apply_gate
from finetune.layers.host_memory import is_in_forecast

#: Share of used experts from which a CPU dequantises all experts.
_MOST_USED_SHARE = 0.75
#: A grouped matmul needs a rank that is a multiple of this (16 bytes of 16-bit elements).
_RANK_MULTIPLE = 8


class UsedExperts(NamedTuple):
    """Experts with rows."""

    #: Ranges of neighbouring used experts, (first, end).
    ranges: tuple[tuple[int, int], ...]
    #: End of the rows of each used expert.
    offsets: torch.Tensor


class ExpertStack(NamedTuple):
    """A fused 4-bit weight of all experts."""

    #: NF4 codes of (experts, out, in), or of (experts, in, out) when transposed.
    codes: torch.Tensor
    #: bitsandbytes' QuantState.
    state: Any
    transposed: bool
    #: (experts, out).
    bias: torch.Tensor | None = None
    #: a, b and scaling of each adapter.
    adapters: tuple[tuple[torch.Tensor, torch.Tensor, float], ...] = ()


class Routing(NamedTuple):
    """One row per token and chosen expert, sorted by expert. Every field is saved for backward."""

    #: Expert of each row.
    experts: torch.Tensor
    #: token * top_k + choice of each row.
    order: torch.Tensor
    #: End of each expert's rows.
    offsets: torch.Tensor
    #: The offsets on the host. Saved, too, so that a recomputed layer keeps its routing.
    host_ends: torch.Tensor | None

    @property
    def used(self) -> UsedExperts | None:
        return used_experts(self.offsets, self.host_ends)


def read_ends(offsets: torch.Tensor) -> torch.Tensor | None:
    """Return the end of each expert's rows on the host; None in a forecast and in a compiled graph."""
    # read once per forward pass, because reading waits for the device
    return None if is_in_forecast(offsets) or torch.compiler.is_compiling() else offsets.cpu()


def used_experts(offsets: torch.Tensor, host_ends: torch.Tensor | None) -> UsedExperts | None:
    """Return the experts with rows, or None to dequantise all experts."""
    # a forecast assumes that all experts have rows
    if host_ends is None:
        return None
    ends = host_ends.tolist()
    is_used = [end > start for start, end in pairwise([0, *ends])]
    # bitsandbytes writes into an existing tensor on a GPU only; a CPU copies, which takes longer than a few more experts
    limit = len(is_used) if offsets.is_cuda else len(is_used) * _MOST_USED_SHARE
    if not 0 < sum(is_used) < limit:
        return None
    # ranges begin and end where `is_used` changes
    edges = [expert for expert, (before, now) in enumerate(pairwise([False, *is_used, False])) if before != now]
    ranges = tuple(zip(edges[::2], edges[1::2], strict=True))
    return UsedExperts(ranges, torch.cat([offsets[first:end] for first, end in ranges]))


def dequantised(codes: torch.Tensor, state: Any, used: UsedExperts | None) -> torch.Tensor:
    """Return the weights of the used experts, (used experts, ...); without `used`, of all experts."""
    if used is None:
        return dequantize_4bit(codes.data, state)
    absmax = state.absmax
    if state.nested:
        absmax = dequantize_blockwise(absmax, state.state2).add_(state.offset).float()
    experts, *shape = state.shape
    codes, absmax = codes.data.view(experts, -1), absmax.view(experts, -1)
    weight = torch.empty(len(used.offsets), *shape, dtype=state.dtype, device=codes.device)
    # on a CPU, the copied experts never take more memory than the unused experts save
    step = experts if weight.is_cuda else experts - len(used.offsets)
    ranges = [(start, min(start + step, end)) for first, end in used.ranges for start in range(first, end, step)]
    position = 0
    for first, end in ranges:
        target = weight[position : position + end - first]
        values = (codes[first:end].reshape(-1, 1), absmax[first:end].reshape(-1), state.blocksize, state.quant_type)
        if weight.is_cuda:
            torch.ops.bitsandbytes.dequantize_4bit.out(*values, target.shape, state.dtype, out=target)
        else:
            target.copy_(torch.ops.bitsandbytes.dequantize_4bit(*values, target.shape, state.dtype))
        position += end - first
    return weight


def product(inputs: torch.Tensor, stack: ExpertStack, offsets: torch.Tensor) -> torch.Tensor:
    """Return each expert's rows of `inputs` (rows, in) times its weight with adapters, without bias: (rows, out)."""
    out = PackedMatmul.apply(inputs, stack, offsets)
    for a, b, scaling in stack.adapters:
        out = torch.add(out, _adapter_product(inputs, a, b, offsets), alpha=scaling)
    return out


class PackedMatmul(torch.autograd.Function):
    """Grouped matmul with a frozen 4-bit weight, saving its codes and the offsets."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, stack: ExpertStack, offsets: torch.Tensor) -> torch.Tensor:
        ends = read_ends(offsets)
        ctx.stack = stack
        ctx.save_for_backward(offsets, ends)
        # neither `inputs` nor the dequantised weight: the weight is frozen, and backward dequantises it again
        return _multiply(inputs, stack, offsets, used_experts(offsets, ends))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        offsets, ends = ctx.saved_tensors
        used = used_experts(offsets, ends)
        return _multiply(grad.contiguous(), ctx.stack, offsets, used, backward=True), None, None


class RoutedExperts(torch.autograd.Function):
    """Sum of score * down(gate(up(x))) over each token's experts, for x (tokens, hidden)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, module: Any,
        stacks: tuple[ExpertStack, ExpertStack], *_adapters: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        up, down = stacks
        routing, top_k = _routing(chosen, experts=up.state.shape[0]), chosen.shape[-1]
        gate_up = _stack_forward(x[routing.order // top_k].to(up.state.dtype), up, routing)
        out = _stack_forward(apply_gate(module, gate_up), down, routing)
        out = out * _sorted_scores(scores, routing)
        ctx.module, ctx.stacks, ctx.top_k = module, stacks, top_k
        ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        # of the activations, only the output of gate and up: for a score s, down's weight W, its input p and the gradient g,
        # d(s * W p)/ds = g . W p = (g W) . p, and backward computes g W anyway
        ctx.save_for_backward(x if up.adapters else None, scores, gate_up, *routing)
        return _summed_by_token(out, routing, top_k).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, scores, gate_up, *routed = ctx.saved_tensors
        (up, down), routing = ctx.stacks, Routing(*routed)
        token = routing.order // ctx.top_k
        sorted_scores, grad_rows = _sorted_scores(scores, routing), grad[token].to(gate_up.dtype)
        with _separate_graph(grad.device.type, ctx.autocast):
            gate_up = gate_up.detach().requires_grad_()
            gated = apply_gate(ctx.module, gate_up)
        down_input = gated.detach()
        # with rows times scores, the adapter's gradients are complete; the rows' gradient is multiplied by the scores below
        read_weighted = functools.partial(_times, down_input, sorted_scores)
        d_gated, down_grads = _stack_backward(grad_rows, down, routing, read_weighted, needs_dx=True)
        assert d_gated is not None
        d_scores = (d_gated * down_input).sum(-1)
        if down.bias is not None:
            d_scores += (grad_rows * down.bias[routing.experts]).sum(-1)
        del grad_rows, down_input, read_weighted
        (d_gate_up,) = torch.autograd.grad(gated, gate_up, _times(d_gated, sorted_scores))
        del gated, gate_up, d_gated
        needs_dx = ctx.needs_input_grad[0]
        dx, up_grads = _stack_backward(d_gate_up, up, routing, lambda: x[token].to(d_gate_up.dtype), needs_dx=needs_dx)
        d_scores = _unsorted(d_scores, routing).view(scores.shape).to(scores.dtype)
        dx = None if dx is None else _summed_by_token(dx, routing, ctx.top_k).to(grad.dtype)
        return dx, d_scores, None, None, None, *up_grads, *down_grads


def _routing(chosen: torch.Tensor, experts: int) -> Routing:
    sorted_experts, order = torch.sort(chosen.reshape(-1))
    all_experts = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    offsets = torch.searchsorted(sorted_experts, all_experts, right=True, out_int32=True)
    return Routing(sorted_experts, order, offsets, read_ends(offsets))


def _sorted_scores(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    return scores.reshape(-1)[routing.order].unsqueeze(-1)


def _unsorted(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
    # no `index_add_`, whose atomic additions give other results each time
    position = torch.empty_like(routing.order)
    position[routing.order] = torch.arange(len(position), device=position.device)
    return rows[position]


def _times(rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return (rows * scores).to(rows.dtype)


def _summed_by_token(rows: torch.Tensor, routing: Routing, top_k: int) -> torch.Tensor:
    return _unsorted(rows, routing).view(-1, top_k, rows.shape[-1]).sum(dim=1)


@contextlib.contextmanager
def _separate_graph(device: str, autocast: tuple[bool, torch.dtype]) -> Iterator[None]:
    enabled, dtype = autocast
    # autocast as in the forward pass; identity hooks, so that no hook of the run offloads or compresses the graph's tensors
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.enable_grad(), torch.autocast(device, dtype, enabled=enabled), hooks:
        yield


def _multiply(
    rows: torch.Tensor, stack: ExpertStack, offsets: torch.Tensor, used: UsedExperts | None, *, backward: bool = False
) -> torch.Tensor:
    weight = dequantised(stack.codes, stack.state, used)
    weight = weight if stack.transposed != backward else weight.transpose(-2, -1)
    return moe._grouped_mm(rows, weight, offs=offsets if used is None else used.offsets)


def _stack_forward(rows: torch.Tensor, stack: ExpertStack, routing: Routing) -> torch.Tensor:
    out = _multiply(rows, stack, routing.offsets, routing.used)
    for a, b, scaling in stack.adapters:
        out.add_(_adapter_product(rows, a, b, routing.offsets), alpha=scaling)
    return out if stack.bias is None else out.add_(stack.bias[routing.experts])


def _stack_backward(
    grad: torch.Tensor, stack: ExpertStack, routing: Routing, read_rows: Callable[[], torch.Tensor], *, needs_dx: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return the gradients of the rows and of each adapter's a and b."""
    dx = _multiply(grad, stack, routing.offsets, routing.used, backward=True) if needs_dx else None
    grads = []
    for a, b, scaling in stack.adapters:
        with _separate_graph(grad.device.type, (False, grad.dtype)):
            inputs = [tensor.detach().requires_grad_() for tensor in (read_rows(), a, b)]
            out = _adapter_product(inputs[0], inputs[1], inputs[2], routing.offsets)
        d_rows, da, db = torch.autograd.grad(out, inputs, grad)
        grads += [da.mul_(scaling), db.mul_(scaling)]
        dx = None if dx is None else dx.add_(d_rows, alpha=scaling)
    return dx, grads


def _adapter_product(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    experts = len(offsets)
    # PEFT stacks the experts' matrices as (experts x rank, in) and (out, rank x experts)
    a = a.to(rows.dtype).reshape(experts, -1, a.shape[-1])
    b = b.to(rows.dtype).reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    padding = -a.shape[1] % _RANK_MULTIPLE
    a, b = F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))
    lora_act = moe._grouped_mm(rows, a.transpose(-2, -1), offs=offsets)
    return moe._grouped_mm(lora_act, b.contiguous().transpose(-2, -1), offs=offsets)
