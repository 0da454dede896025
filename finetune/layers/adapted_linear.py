"""A frozen linear layer and its adapter as one operator, for compiled layers."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812

from finetune.layers.lean_functions import Linear, linear_backward, scaled_product
from finetune.layers.lean_layers import is_adapted, linear_of
from finetune.layers.nf4 import MORE_TABLES, QuantTables, linear_4bit

_LIBRARY = torch.library.Library("finetune", "FRAGMENT")
#: Without a `quant_type` the weight is 16-bit and has no tables.
_WEIGHT = f"Tensor weight, Tensor? bias, Tensor? absmax, {MORE_TABLES}"
_NO_TABLES = QuantTables((), (), quant_type="")
_LIBRARY.define("adapter_input(Tensor x, Tensor a, float scale) -> Tensor")
_LIBRARY.define(f"adapted_linear(Tensor x, Tensor lora_act, Tensor b, {_WEIGHT}) -> Tensor")
_LIBRARY.define(
    "adapted_linear_backward(Tensor grad, Tensor x, Tensor lora_act, Tensor a, Tensor b, float scale, "
    f"{_WEIGHT}) -> (Tensor, Tensor, Tensor)"
)
# Without these operators the compiler would allocate the adapter's product and the sum as separate tensors, and might
# dequantise a weight long before its use. Here cuBLAS adds to the output, and a dequantised weight lives within an operator.
_OPERATORS = torch.ops.finetune


def adapter_input(x: torch.Tensor, a: torch.Tensor, scale: float) -> torch.Tensor:
    """Return scale * x @ A.T, (tokens, rank), for x (..., in)."""
    # an operator by itself, because a recomputed layer needs it without the output
    return scaled_product(x.reshape(-1, x.shape[-1]), a.t(), scale)


def adapted_linear(
    x: torch.Tensor, lora_act: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, bias: Any, *tables: Any
) -> torch.Tensor:
    """Return x @ W.T + bias + lora_act @ B.T, (..., out), for x (..., in)."""
    quant_tables, flat = _tables(*tables), x.reshape(-1, x.shape[-1])
    out = F.linear(flat, weight, bias) if quant_tables is None else linear_4bit(flat, weight, quant_tables, bias)
    return out.addmm_(lora_act, b.t()).view(*x.shape[:-1], -1)


def adapted_linear_backward(
    grad: torch.Tensor, x: torch.Tensor, lora_act: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float,
    weight: torch.Tensor, bias: Any, *tables: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradients of x, a and b."""
    linear = Linear(weight, bias, _tables(*tables), a, b, scale, trains_a=True, trains_b=True)
    flat = x.reshape(-1, x.shape[-1])
    cast = a, b
    if a.dtype != grad.dtype:
        cast = torch.empty_like(a, dtype=grad.dtype), torch.empty_like(b, dtype=grad.dtype)
        torch._foreach_copy_(cast, (a, b))  # one kernel
    dx, da, db = linear_backward(grad.reshape(-1, grad.shape[-1]), linear, cast, lora_act, lambda: flat)
    assert dx is not None and da is not None and db is not None
    return dx.view(x.shape), da, db


def _tables(*arguments: Any) -> QuantTables | None:
    *tensors, shape_and_block, quant_type = arguments
    tensors = [tensor for tensor in tensors if tensor is not None]
    return QuantTables(tuple(tensors), shape_and_block, quant_type) if quant_type else None


class _AdaptedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float, *weight_args: Any) -> torch.Tensor:
        lora_act = _OPERATORS.adapter_input(x, a.to(x.dtype), scale)
        *tensors, ctx.shape_and_block, ctx.quant_type = weight_args
        ctx.scale = scale
        ctx.save_for_backward(x, lora_act, a, b, *tensors)
        return _OPERATORS.adapted_linear(x, lora_act, b.to(x.dtype), *weight_args)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, lora_act, a, b, *tensors = ctx.saved_tensors
        weight_args = (*tensors, ctx.shape_and_block, ctx.quant_type)
        gradients = _OPERATORS.adapted_linear_backward(grad, x, lora_act, a, b, ctx.scale, *weight_args)
        return *gradients, *[None] * (1 + len(weight_args))


#: Python body of an operator -> fake implementation, which only allocates the results.
_FAKES: dict[Callable[..., Any], Callable[..., Any]] = {
    adapter_input: lambda x, a, _: x.new_empty(x.numel() // x.shape[-1], a.shape[0]),
    adapted_linear: lambda x, _, b, *__: x.new_empty(*x.shape[:-1], b.shape[0]),
    # contiguous, as the body's results are: `empty_like` would keep the strides of a transposed input
    adapted_linear_backward: lambda _, x, __, a, b, *___: tuple(tensor.new_empty(tensor.shape) for tensor in (x, a, b)),
}
#: Operator -> its Python body.
BODIES: dict[Any, Callable[..., Any]] = {}
for body, fake in _FAKES.items():
    _LIBRARY.impl(body.__name__, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"finetune::{body.__name__}", fake, lib=_LIBRARY)
    BODIES[getattr(_OPERATORS, body.__name__).default] = body


def use_operators(layers: list[torch.nn.Module]) -> None:
    """Make linear layers with plain adapters run as one operator."""
    for module in (module for layer in layers for module in layer.modules()):
        if is_adapted(module) and "forward" not in vars(module):
            module.forward = MethodType(_linear_forward, module)


def undo_operators(layers: list[torch.nn.Module]) -> None:
    """Restore the forward of the layers' classes."""
    for module in (module for layer in layers for module in layer.modules()):
        if getattr(vars(module).get("forward"), "__func__", None) is _linear_forward:
            del module.forward


def _linear_forward(self: Any, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
    linear = None if args or named else linear_of(self, x)
    if linear is None or linear.a is None or linear.b is None or not (linear.trains_a and linear.trains_b):
        return type(self).forward(self, x, *args, **named)
    tables = (linear.tables or _NO_TABLES).arguments()
    return _AdaptedLinear.apply(x, linear.a, linear.b, linear.scale, linear.weight, linear.bias, *tables)
