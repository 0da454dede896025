"""4-bit experts: a mixture's fused 3-D weights as NF4 codes, computed by `routed_experts`."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import torch
from transformers.integrations import moe

from finetune.compat.peft import adapt_packed_parameters
from finetune.compat.transformers import replace_grouped_linear
from finetune.layers.routed_experts import ExpertStack, RoutedExperts, product

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
    return any(getattr(config, name, None) for name in EXPERT_COUNTS)


def name_experts_for_trl(config: Any) -> None:
    """Set `num_experts`, which TRL reads for the router's auxiliary loss."""
    # a dense model of a mixture's type (Granite 4, Doge) has no router, so no auxiliary loss
    is_dense = getattr(config, "is_moe", None) is False
    if not hasattr(config, "output_router_logits") or (hasattr(config, "num_experts") and not is_dense):
        return
    experts = next((count for name in EXPERT_COUNTS if (count := getattr(config, name, None))), None)
    if experts and not is_dense:
        config.num_experts = experts
    else:
        config.router_aux_loss_coef = 0.0


def fused_experts(model: torch.nn.Module, config: Any) -> list[torch.nn.Parameter]:
    """Return the unpacked 3-D weights of a mixture's experts."""
    counts = {count for name in EXPERT_COUNTS if (count := getattr(config, name, None))}
    # a convolution is 3-D, too, but its first dimension is channels
    return [weight for weight in model.parameters() if weight.dim() == 3 and weight.shape[0] in counts]


def packable_experts(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, str]]:
    """Yield path, module and parameter name of each fused weight that can be 4-bit."""
    for path, module in model.named_modules():
        for name, weight in _expert_weights(module):
            if weight.dim() == 3 and weight.numel() <= MOST_ELEMENTS and weight.shape[-1] % _BLOCK == 0:
                yield path, module, name


def _expert_weights(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    # transformers' decorator for grouped experts sets both attributes
    if hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
        for name in EXPERT_WEIGHTS:
            if (weight := module._parameters.get(name)) is not None:
                yield name, weight


# bitsandbytes quantises only linear layers, and autograd would keep every layer's dequantised experts for backward: so the
# weights become Params4bit here, and the forward is replaced. An expert's adapter is two small grouped matmuls.
def pack_experts(model: torch.nn.Module, quantization: Any, skip_modules: list[str]) -> None:
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


def split_targets(model: torch.nn.Module, names: list[str]) -> tuple[list[str], list[str]]:
    """Split `target_modules` into layers and PEFT's `target_parameters`."""
    modules = [(path.rpartition(".")[2], module) for path, module in model.named_modules()]
    layers = {name for name, module in modules if not _is_router(module)}
    fused = {name for _, module in modules for name, _ in _expert_weights(module)} - layers
    parameter_of = {name: weight for name, weight in _FUSED.items() if weight in fused} | {weight: weight for weight in fused}
    parameter_of |= {name: f"{name}.weight" for name, module in modules if _is_router(module)}
    parameters = {name: parameter_of[name] for name in names if name in parameter_of and name not in layers}
    return [name for name in names if name not in parameters], sorted(set(parameters.values()))


def _is_router(module: torch.nn.Module) -> bool:
    # a router whose weight, (experts, hidden), is a parameter of the module instead of a linear layer's
    weight = module._parameters.get("weight")
    experts = getattr(module, "num_experts", None)
    return not isinstance(module, torch.nn.Linear) and weight is not None and weight.dim() == 2 and len(weight) == experts


def adapts_experts(model: Any) -> bool:
    """Return whether a PeftModel has adapters on experts."""
    targets = model.peft_config["default"].target_parameters or ()
    return any(name.rpartition(".")[2] in EXPERT_WEIGHTS for name in targets)


def logical_weight(weight: torch.Tensor) -> torch.Tensor:
    """Return a placeholder with the shape, dtype and device of a packed weight; any other weight unchanged."""
    state = getattr(weight, "quant_state", None)
    # one element, expanded: PEFT reads its shape, not its values
    return weight if state is None else torch.empty(1, dtype=state.dtype, device=weight.device).expand(state.shape)


def _packed_linear(
    inputs: torch.Tensor, weight: Any, offsets: torch.Tensor, bias: torch.Tensor | None = None, is_transposed: bool = False
) -> torch.Tensor | None:
    """Return each expert's rows times its packed weight, or None for an unpacked weight."""
    # inputs: (rows, in), sorted by expert; offsets: the end of each expert's rows
    stack = _stack(weight, is_transposed)
    if stack is None:
        return None
    out = product(inputs.to(stack.state.dtype), stack, offsets)
    return out if bias is None else out + bias


def _stack(weight: Any, transposed: bool, bias: torch.Tensor | None = None) -> ExpertStack | None:
    state, adapters = getattr(weight, "quant_state", None), tuple(getattr(weight, "lora_weights", ()))
    return None if state is None else ExpertStack(weight, state, transposed, bias, adapters)


def _experts_forward(self: Any, hidden: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    weights = ("gate_up_proj" if self.has_gate else "up_proj", "down_proj")
    biases = [getattr(self, f"{weight}_bias") if self.has_bias else None for weight in weights]
    stacks = [_stack(getattr(self, weight), self.is_transposed, bias) for weight, bias in zip(weights, biases, strict=True)]
    trains_bias = any(bias is not None and bias.requires_grad for bias in biases)
    packed = tuple(stack for stack in stacks if stack is not None)
    # cases that `RoutedExperts` does not compute
    unsupported = trains_bias or len(packed) < len(stacks) or self.has_post_expert_norm or self._is_expert_parallel
    # `make_lean` sets "lean"
    if unsupported or not ("lean" in vars(self) and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return moe.grouped_mm_experts_forward(self, hidden, chosen, scores)
    adapters = [tensor for stack in packed for a, b, _ in stack.adapters for tensor in (a, b)]
    return RoutedExperts.apply(hidden, scores, chosen, self, packed, *adapters)


def is_packed(module: torch.nn.Module) -> bool:
    """Return whether a module holds 4-bit experts."""
    return getattr(vars(module).get("forward"), "__func__", None) is _experts_forward
