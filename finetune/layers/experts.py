"""4-bit experts: a mixture's fused 3-D weights as NF4 codes; only experts with rows are dequantised."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from bitsandbytes.functional import dequantize_4bit, dequantize_blockwise
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.integrations import moe

from finetune.compat.peft import adapt_packed_parameters
from finetune.compat.transformers import apply_gate, replace_grouped_linear
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
    offsets: Tensor


class ExpertStack(NamedTuple):
    """A fused 4-bit weight of all experts."""

    #: NF4 codes of (experts, out, in), or of (experts, in, out) when transposed.
    codes: Tensor
    #: bitsandbytes' QuantState.
    state: Any
    transposed: bool
    #: (experts, out).
    bias: Tensor | None = None
    #: a, b and scaling of each adapter.
    adapters: tuple[tuple[Tensor, Tensor, float], ...] = ()


class Routing(NamedTuple):
    """One row per token and chosen expert, sorted by expert. Every field is saved for backward."""

    #: Expert of each row.
    experts: Tensor
    #: token * top_k + choice of each row.
    order: Tensor
    #: End of each expert's rows.
    offsets: Tensor
    #: The offsets on the host. Saved, too, so that a recomputed layer keeps its routing.
    host_ends: Tensor | None


def read_ends(offsets: Tensor) -> Tensor | None:
    """Return the end of each expert's rows on the host; None in a forecast and in a compiled graph."""
    # read once per forward pass, because reading waits for the device
    return None if is_in_forecast(offsets) or torch.compiler.is_compiling() else offsets.cpu()


def used_experts(offsets: Tensor, host_ends: Tensor | None) -> UsedExperts | None:
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


def dequantised(codes: Tensor, state: Any, used: UsedExperts | None) -> Tensor:
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


def product(inputs: Tensor, stack: ExpertStack, offsets: Tensor) -> Tensor:
    """Return each expert's rows of `inputs` (rows, in) times its weight with adapters, without bias: (rows, out)."""
    out = PackedMatmul.apply(inputs, stack, offsets)
    for a, b, scaling in stack.adapters:
        out = torch.add(out, _adapter_product(inputs, a, b, offsets), alpha=scaling)
    return out


class PackedMatmul(torch.autograd.Function):
    """Grouped matmul with a frozen 4-bit weight, saving its codes and the offsets."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, stack: ExpertStack, offsets: Tensor) -> Tensor:
        ends = read_ends(offsets)
        ctx.stack = stack
        ctx.save_for_backward(offsets, ends)
        # neither `inputs` nor the dequantised weight: the weight is frozen, and backward dequantises it again
        return _multiply(inputs, stack, offsets, ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        return _multiply(grad.contiguous(), ctx.stack, *ctx.saved_tensors, backward=True), None, None


class RoutedExperts(torch.autograd.Function):
    """Sum of score * down(gate(up(x))) over each token's experts, for x (tokens, hidden)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scores: Tensor, chosen: Tensor, module: Any, stacks: Sequence[ExpertStack], *_adapters: Tensor
    ) -> Tensor:
        up, down = stacks
        routing, top_k = _routing(chosen, experts=up.state.shape[0]), chosen.shape[-1]
        gate_up = _stack_forward(x[routing.order // top_k].to(up.state.dtype), up, routing)
        out = _stack_forward(apply_gate(module, gate_up), down, routing)
        out = out * scores.reshape(-1)[routing.order].unsqueeze(-1)
        ctx.module, ctx.stacks, ctx.top_k = module, stacks, top_k
        ctx.autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
        # of the activations, only the output of gate and up: for a score s, down's weight W, its input p and the gradient g,
        # d(s * W p)/ds = g . W p = (g W) . p, and backward computes g W anyway
        ctx.save_for_backward(x if up.adapters else None, scores, gate_up, *routing)
        return _summed_by_token(out, routing, top_k).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, scores, gate_up, *routed = ctx.saved_tensors
        (up, down), routing = ctx.stacks, Routing(*routed)
        token = routing.order // ctx.top_k
        sorted_scores, grad_rows = scores.reshape(-1)[routing.order].unsqueeze(-1), grad[token].to(gate_up.dtype)
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


def _routing(chosen: Tensor, experts: int) -> Routing:
    sorted_experts, order = torch.sort(chosen.reshape(-1))
    all_experts = torch.arange(experts, device=chosen.device, dtype=chosen.dtype)
    offsets = torch.searchsorted(sorted_experts, all_experts, right=True, out_int32=True)
    return Routing(sorted_experts, order, offsets, read_ends(offsets))


def _unsorted(rows: Tensor, routing: Routing) -> Tensor:
    # no `index_add_`, whose atomic additions give other results each time
    position = torch.empty_like(routing.order)
    position[routing.order] = torch.arange(len(position), device=position.device)
    return rows[position]


def _times(rows: Tensor, scores: Tensor) -> Tensor:
    return (rows * scores).to(rows.dtype)


def _summed_by_token(rows: Tensor, routing: Routing, top_k: int) -> Tensor:
    return _unsorted(rows, routing).view(-1, top_k, rows.shape[-1]).sum(dim=1)


@contextlib.contextmanager
def _separate_graph(device: str, autocast: tuple[bool, torch.dtype]) -> Iterator[None]:
    enabled, dtype = autocast
    # autocast as in the forward pass; identity hooks, so that no hook of the run offloads or compresses the graph's tensors
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.enable_grad(), torch.autocast(device, dtype, enabled=enabled), hooks:
        yield


def _multiply(rows: Tensor, stack: ExpertStack, offsets: Tensor, ends: Tensor | None, *, backward: bool = False) -> Tensor:
    used = used_experts(offsets, ends)
    weight = dequantised(stack.codes, stack.state, used)
    weight = weight if stack.transposed != backward else weight.transpose(-2, -1)
    return moe._grouped_mm(rows, weight, offs=offsets if used is None else used.offsets)


def _stack_forward(rows: Tensor, stack: ExpertStack, routing: Routing) -> Tensor:
    out = _multiply(rows, stack, routing.offsets, routing.host_ends)
    for a, b, scaling in stack.adapters:
        out.add_(_adapter_product(rows, a, b, routing.offsets), alpha=scaling)
    return out if stack.bias is None else out.add_(stack.bias[routing.experts])


def _stack_backward(
    grad: Tensor, stack: ExpertStack, routing: Routing, read_rows: Callable[[], Tensor], *, needs_dx: bool
) -> tuple[Tensor | None, list[Tensor]]:
    """Return the gradients of the rows and of each adapter's a and b."""
    dx = _multiply(grad, stack, routing.offsets, routing.host_ends, backward=True) if needs_dx else None
    grads = []
    for a, b, scaling in stack.adapters:
        with _separate_graph(grad.device.type, (False, grad.dtype)):
            inputs = [tensor.detach().requires_grad_() for tensor in (read_rows(), a, b)]
            out = _adapter_product(inputs[0], inputs[1], inputs[2], routing.offsets)
        d_rows, da, db = torch.autograd.grad(out, inputs, grad)
        grads += [da.mul_(scaling), db.mul_(scaling)]
        dx = None if dx is None else dx.add_(d_rows, alpha=scaling)
    return dx, grads


def _adapter_product(rows: Tensor, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    experts = len(offsets)
    # PEFT stacks the experts' matrices as (experts x rank, in) and (out, rank x experts)
    a = a.to(rows.dtype).reshape(experts, -1, a.shape[-1])
    b = b.to(rows.dtype).reshape(b.shape[0], -1, experts).permute(2, 0, 1)
    padding = -a.shape[1] % _RANK_MULTIPLE
    a, b = F.pad(a, (0, 0, 0, padding)), F.pad(b, (0, padding))
    lora_act = moe._grouped_mm(rows, a.transpose(-2, -1), offs=offsets)
    return moe._grouped_mm(lora_act, b.contiguous().transpose(-2, -1), offs=offsets)


#: Names of fused weights, as transformers' grouped matmul of experts reads them.
EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")
#: Configuration keys of the number of experts.
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
#: Layer name in separate experts, as in older checkpoints -> fused weight.
_FUSED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj", "w1": "gate_up_proj", "w3": "gate_up_proj", "w2": "down_proj"}
#: bitsandbytes' kernels count elements in 32 bits, and its CPU kernels need whole blocks in each row.
MOST_ELEMENTS, _BLOCK = 2**31 - 1, 64


def has_experts(config: Any) -> bool:
    """Return whether a configuration is of a mixture of experts."""
    return bool(_expert_counts(config))


def _expert_counts(config: Any) -> list[int]:
    return [count for name in EXPERT_COUNTS if (count := getattr(config, name, None))]


def name_experts_for_trl(config: Any) -> None:
    """Set `num_experts`, which TRL reads for the router's auxiliary loss."""
    # a dense model of a mixture's type (Granite 4, Doge) has no router, so no auxiliary loss
    is_dense = getattr(config, "is_moe", None) is False
    if not hasattr(config, "output_router_logits") or (hasattr(config, "num_experts") and not is_dense):
        return
    counts = _expert_counts(config)
    if counts and not is_dense:
        config.num_experts = counts[0]
    else:
        config.router_aux_loss_coef = 0.0


def fused_experts(model: nn.Module, config: Any) -> list[nn.Parameter]:
    """Return the unpacked 3-D weights of a mixture's experts."""
    counts = _expert_counts(config)
    # a convolution is 3-D, too, but its first dimension is channels
    return [weight for weight in model.parameters() if weight.dim() == 3 and weight.shape[0] in counts]


def packable_experts(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield path, module and parameter name of each fused weight that can be 4-bit."""
    for path, module in model.named_modules():
        for name, weight in _expert_weights(module):
            if weight.dim() == 3 and weight.numel() <= MOST_ELEMENTS and weight.shape[-1] % _BLOCK == 0:
                yield path, module, name


def _expert_weights(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    # transformers' decorator for grouped experts sets both attributes
    if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
        for name in EXPERT_WEIGHTS:
            if (weight := module._parameters.get(name)) is not None:
                yield name, weight


# bitsandbytes quantises only linear layers, and autograd would keep every layer's dequantised experts for backward: so the
# weights become Params4bit here, and the forward is replaced. An expert's adapter is two small grouped matmuls.
def pack_experts(model: nn.Module, quantization: Any, skip_modules: list[str]) -> None:
    """Make loading quantise a meta model's fused expert weights, except in `skip_modules`."""
    from bitsandbytes.nn import Params4bit

    replace_grouped_linear(_packed_linear)
    adapt_packed_parameters(logical_weight)
    for path, module, name in list(packable_experts(model)):
        if any(path == skipped or path.endswith(f".{skipped}") for skipped in skip_modules):
            continue
        weight = module._parameters[name]
        module._parameters[name] = Params4bit(
            weight.data,  # type: ignore[union-attr]
            requires_grad=False,
            compress_statistics=quantization.bnb_4bit_use_double_quant,
            quant_type=quantization.bnb_4bit_quant_type,
            quant_storage=quantization.bnb_4bit_quant_storage,
        )
        module.source_cls = type(module)  # type: ignore[assignment]  # read by transformers' quantising operation
        module.forward = types.MethodType(_experts_forward, module)


def split_targets(model: nn.Module, names: list[str]) -> tuple[list[str], list[str]]:
    """Split `target_modules` into layers and PEFT's `target_parameters`."""
    modules = [(path.rpartition(".")[2], module) for path, module in model.named_modules()]
    layers = {name for name, module in modules if not _is_router(module)}
    fused = {name for _, module in modules for name, _ in _expert_weights(module)} - layers
    parameter_of = {name: weight for name, weight in _FUSED.items() if weight in fused} | {weight: weight for weight in fused}
    parameter_of |= {name: f"{name}.weight" for name, module in modules if _is_router(module)}
    parameters = {name: parameter_of[name] for name in names if name in parameter_of and name not in layers}
    return [name for name in names if name not in parameters], sorted(set(parameters.values()))


def _is_router(module: nn.Module) -> bool:
    # a router whose weight, (experts, hidden), is a parameter of the module instead of a linear layer's
    weight = module._parameters.get("weight")
    experts = getattr(module, "num_experts", None)
    return not isinstance(module, nn.Linear) and weight is not None and weight.dim() == 2 and len(weight) == experts


def adapts_experts(model: Any) -> bool:
    """Return whether a PeftModel has adapters on experts."""
    targets = model.peft_config["default"].target_parameters or ()
    return any(name.rpartition(".")[2] in EXPERT_WEIGHTS for name in targets)


def logical_weight(weight: Tensor) -> Tensor:
    """Return a placeholder with the shape, dtype and device of a packed weight; any other weight unchanged."""
    state = getattr(weight, "quant_state", None)
    # one element, expanded: PEFT reads its shape, not its values
    return weight if state is None else torch.empty(1, dtype=state.dtype, device=weight.device).expand(state.shape)


def _packed_linear(
    inputs: Tensor, weight: Any, offsets: Tensor, bias: Tensor | None = None, is_transposed: bool = False
) -> Tensor | None:
    """Return each expert's rows times its packed weight, or None for an unpacked weight."""
    # inputs: (rows, in), sorted by expert; offsets: the end of each expert's rows
    stack = _stack(weight, is_transposed)
    if stack is None:
        return None
    out = product(inputs.to(stack.state.dtype), stack, offsets)
    return out if bias is None else out + bias


def _stack(weight: Any, transposed: bool, bias: Tensor | None = None) -> Any:
    """Return the `ExpertStack` of a packed weight, or None for an unpacked weight."""
    state, adapters = getattr(weight, "quant_state", None), tuple(getattr(weight, "lora_weights", ()))
    return None if state is None else ExpertStack(weight, state, transposed, bias, adapters)


def _experts_forward(self: Any, hidden: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    weights = ("gate_up_proj" if self.has_gate else "up_proj", "down_proj")
    biases = [getattr(self, f"{weight}_bias") if self.has_bias else None for weight in weights]
    stacks = [_stack(getattr(self, weight), self.is_transposed, bias) for weight, bias in zip(weights, biases, strict=True)]
    trains_bias = any(bias is not None and bias.requires_grad for bias in biases)
    # cases that `RoutedExperts` does not compute
    unsupported = trains_bias or None in stacks or self.has_post_expert_norm or self._is_expert_parallel
    # `make_lean` sets "lean"
    if unsupported or not ("lean" in vars(self) and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return moe.grouped_mm_experts_forward(self, hidden, chosen, scores)
    adapters = [tensor for stack in stacks for a, b, _ in stack.adapters for tensor in (a, b)]
    return RoutedExperts.apply(hidden, scores, chosen, self, stacks, *adapters)


def is_packed(module: nn.Module) -> bool:
    """Return whether a module holds 4-bit experts."""
    return getattr(vars(module).get("forward"), "__func__", None) is _experts_forward
