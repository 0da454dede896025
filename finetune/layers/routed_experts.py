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
from finetune.layers.host_memory import is_forecast

#: Share of used experts above which a CPU dequantises all experts.
_WORTH_COPYING = 0.75
#: Elements of 16 bits to which a grouped matmul aligns the rows of its operands.
_ALIGNED = 8


class UsedExperts(NamedTuple):
    """Experts that got rows."""

    #: Ranges of neighbouring experts (first, end).
    ranges: tuple[tuple[int, int], ...]
    #: End of the rows of each used expert.
    offsets: torch.Tensor


class ExpertStack(NamedTuple):
    """A fused 4-bit weight of all experts."""

    #: NF4 codes of (experts, out, in), or of (experts, in, out) when transposed.
    codes: torch.Tensor
    state: Any
    transposed: bool
    #: (experts, out).
    bias: torch.Tensor | None = None
    adapters: tuple[tuple[torch.Tensor, torch.Tensor, float], ...] = ()


class Routing(NamedTuple):
    """Rows sorted by expert, all saved for backward."""

    #: Expert of each row.
    experts: torch.Tensor
    #: Position of each row in (token, choice).
    order: torch.Tensor
    #: End of each expert's rows.
    offsets: torch.Tensor
    #: The offsets on the host. Saved, too, so that a recomputed layer keeps its routing.
    ends: torch.Tensor | None

    @property
    def used(self) -> UsedExperts | None:
        return used_experts(self.offsets, self.ends)


def read_ends(offsets: torch.Tensor) -> torch.Tensor | None:
    """Return the end of each expert's rows on the host; None in a forecast and in a compiled graph."""
    # read once per forward pass, because reading waits for the device
    return None if is_forecast(offsets) or torch.compiler.is_compiling() else offsets.cpu()


def used_experts(offsets: torch.Tensor, host_ends: torch.Tensor | None) -> UsedExperts | None:
    """Return the experts that got rows; None: dequantise all."""
    # a forecast assumes that all experts got rows
    if host_ends is None:
        return None
    ends = host_ends.tolist()
    used = [end > start for start, end in pairwise([0, *ends])]
    # bitsandbytes writes into a given tensor on a GPU only; elsewhere copies would take longer than a few experts more
    worth = len(used) if offsets.is_cuda else len(used) * _WORTH_COPYING
    if not 0 < sum(used) < worth:
        return None
    edges = [expert for expert, (before, now) in enumerate(pairwise([False, *used, False])) if before != now]
    ranges = tuple(zip(edges[::2], edges[1::2], strict=True))
    return UsedExperts(ranges, torch.cat([offsets[first:end] for first, end in ranges]))


def dequantised(codes: torch.Tensor, state: Any, used: UsedExperts | None) -> torch.Tensor:
    """Return the weights of the used experts, (used experts, ...); of all experts for None."""
    if used is None:
        return dequantize_4bit(codes.data, state)
    absmax = state.absmax
    if state.nested:
        absmax = dequantize_blockwise(absmax, state.state2).add_(state.offset).float()
    experts, *shape = state.shape
    codes, absmax = codes.data.view(experts, -1), absmax.view(experts, -1)
    weight = torch.empty(len(used.offsets), *shape, dtype=state.dtype, device=codes.device)
    # a copy takes no more than what isn't dequantised
    writes, largest = weight.is_cuda, experts - len(used.offsets)
    ranges = used.ranges if writes else [part for whole in used.ranges for part in _parts(*whole, largest)]
    start = 0
    for first, end in ranges:
        part = weight[start : start + end - first]
        values = (codes[first:end].reshape(-1, 1), absmax[first:end].reshape(-1), state.blocksize, state.quant_type)
        if writes:
            torch.ops.bitsandbytes.dequantize_4bit.out(*values, part.shape, state.dtype, out=part)
        else:
            part.copy_(torch.ops.bitsandbytes.dequantize_4bit(*values, part.shape, state.dtype))
        start += end - first
    return weight


def _parts(first: int, end: int, largest: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + largest, end)) for start in range(first, end, largest))


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
        # neither inputs nor dequantised weight are saved: the weight is frozen, and backward dequantises again
        return _multiply(inputs, stack, offsets, used_experts(offsets, ends))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        offsets, ends = ctx.saved_tensors
        used = used_experts(offsets, ends)
        return _multiply(grad.contiguous(), ctx.stack, offsets, used, backward=True), None, None


class RoutedExperts(torch.autograd.Function):
    """sum of score * down(gate(up(x))) over each token's experts, for x (tokens, hidden)."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scores: torch.Tensor, chosen: torch.Tensor, module: Any,
        stacks: tuple[ExpertStack, ExpertStack], *_adapters: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        up, down = stacks
        routing, top_k = _routing(chosen, up.state.shape[0]), chosen.shape[-1]
        gate_up = _stack_forward(x[routing.order // top_k].to(up.state.dtype), up, routing)
        out = _stack_forward(apply_gate(module, gate_up), down, routing)
        out = out * _sorted_scores(scores, routing)
        ctx.module, ctx.stacks, ctx.top_k = module, stacks, top_k
        ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        # only the outputs of gate and up: since d(s * W p)/ds = g . W p = (g W) . p, the product of a row's gradient with the
        # down projection also gives the gradient of its score
        ctx.save_for_backward(x if up.adapters else None, scores, gate_up, *routing)
        return _summed(out, routing, top_k).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, scores, gate_up, *routed = ctx.saved_tensors
        (up, down), routing = ctx.stacks, Routing(*routed)
        token = routing.order // ctx.top_k
        sorted_scores, grad_rows = _sorted_scores(scores, routing), grad[token].to(gate_up.dtype)
        with _own_graph(grad.device.type, ctx.autocast):
            gate_up = gate_up.detach().requires_grad_()
            gated = apply_gate(ctx.module, gate_up)
        values = gated.detach()
        # the adapter gets rows times scores: its gradients are right, and the rows' gradient lacks the scores
        weighted = functools.partial(_times, values, sorted_scores)
        d_gated, down_grads = _stack_backward(grad_rows, down, routing, weighted, needs_dx=True)
        assert d_gated is not None
        d_scores = (d_gated * values).sum(-1)
        if down.bias is not None:
            d_scores += (grad_rows * down.bias[routing.experts]).sum(-1)
        del grad_rows, values, weighted
        (d_gate_up,) = torch.autograd.grad(gated, gate_up, _times(d_gated, sorted_scores))
        del gated, gate_up, d_gated
        needs_dx = ctx.needs_input_grad[0]
        dx, up_grads = _stack_backward(d_gate_up, up, routing, lambda: x[token].to(d_gate_up.dtype), needs_dx=needs_dx)
        d_scores = _unsorted(d_scores, routing).view(scores.shape).to(scores.dtype)
        dx = None if dx is None else _summed(dx, routing, ctx.top_k).to(grad.dtype)
        return dx, d_scores, None, None, None, *up_grads, *down_grads


def _routing(chosen: torch.Tensor, experts: int) -> Routing:
    sorted_experts, order = torch.sort(chosen.reshape(-1))
    every = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    offsets = torch.searchsorted(sorted_experts, every, right=True, out_int32=True)
    return Routing(sorted_experts, order, offsets, read_ends(offsets))


def _sorted_scores(scores: torch.Tensor, routing: Routing) -> torch.Tensor:
    return scores.reshape(-1)[routing.order].unsqueeze(-1)


def _unsorted(rows: torch.Tensor, routing: Routing) -> torch.Tensor:
    # without atomic additions: the same result each time
    position = torch.empty_like(routing.order)
    position[routing.order] = torch.arange(len(position), device=position.device)
    return rows[position]


def _times(rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return (rows * scores).to(rows.dtype)


def _summed(rows: torch.Tensor, routing: Routing, top_k: int) -> torch.Tensor:
    return _unsorted(rows, routing).view(-1, top_k, rows.shape[-1]).sum(dim=1)


@contextlib.contextmanager
def _own_graph(device: str, autocast: tuple[bool, torch.dtype]) -> Iterator[None]:
    enabled, dtype = autocast
    # a graph as in the forward pass, whose tensors no hook of the run offloads or compresses
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
        with _own_graph(grad.device.type, (False, grad.dtype)):
            inputs = [tensor.detach().requires_grad_() for tensor in (a, b, read_rows())]
            out = _adapter_product(inputs[2], inputs[0], inputs[1], routing.offsets)
        da, db, d_rows = torch.autograd.grad(out, inputs, grad)
        grads += [da.mul_(scaling), db.mul_(scaling)]
        dx = None if dx is None else dx.add_(d_rows, alpha=scaling)
    return dx, grads


def _adapter_product(rows: torch.Tensor, a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    experts = len(offsets)
    # PEFT stacks the experts' matrices as (experts x rank, in) and (out, rank x experts)
    a = a.to(rows.dtype).reshape(experts, -1, a.shape[-1])
    b = b.to(rows.dtype).reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    padding = -a.shape[1] % _ALIGNED
    a, b = F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))
    lora_act = moe._grouped_mm(rows, a.transpose(-2, -1), offs=offsets)
    return moe._grouped_mm(lora_act, b.contiguous().transpose(-2, -1), offs=offsets)
