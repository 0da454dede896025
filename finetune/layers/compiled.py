"""Compiled decoder layers: an adapted linear layer is one operator, and layers of a kind share one graph for all lengths."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics

from finetune.compat.torch import call_bodies, raising_compiler_errors, set_compiler
from finetune.layers.checkpointing import require_gradient
from finetune.layers.lean_functions import Linear, linear_backward, scaled_product
from finetune.layers.lean_layers import is_adapted, linear_of, set_forward
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


def adapter_input(x: Tensor, a: Tensor, scale: float) -> Tensor:
    """Return scale * x @ A.T, (tokens, rank), for x (..., in)."""
    # an operator by itself, because a recomputed layer needs it without the output
    return scaled_product(x.reshape(-1, x.shape[-1]), a.t(), scale)


def adapted_linear(x: Tensor, lora_act: Tensor, b: Tensor, weight: Tensor, bias: Any, *tables: Any) -> Tensor:
    """Return x @ W.T + bias + lora_act @ B.T, (..., out), for x (..., in)."""
    quant_tables, flat = _tables(*tables), x.reshape(-1, x.shape[-1])
    out = F.linear(flat, weight, bias) if quant_tables is None else linear_4bit(flat, weight, quant_tables, bias)
    return out.addmm_(lora_act, b.t()).view(*x.shape[:-1], -1)


def adapted_linear_backward(
    grad: Tensor, x: Tensor, lora_act: Tensor, a: Tensor, b: Tensor, scale: float, weight: Tensor, bias: Any, *tables: Any
) -> tuple[Tensor, ...]:
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
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, scale: float, *weight_args: Any) -> Tensor:
        lora_act = _OPERATORS.adapter_input(x, a.to(x.dtype), scale)
        *tensors, ctx.shape_and_block, ctx.quant_type = weight_args
        ctx.scale = scale
        ctx.save_for_backward(x, lora_act, a, b, *tensors)
        return _OPERATORS.adapted_linear(x, lora_act, b.to(x.dtype), *weight_args)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
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


def use_operators(layers: list[nn.Module]) -> None:
    """Make linear layers with plain adapters run as one operator, until `undo_lean`."""
    for module in (module for layer in layers for module in layer.modules()):
        if is_adapted(module) and "forward" not in vars(module):
            set_forward(module, _linear_forward)


def _linear_forward(self: Any, x: Tensor, *args: Any, **named: Any) -> Tensor:
    linear = None if args or named else linear_of(self, x)
    if linear is None or linear.a is None or linear.b is None or not (linear.trains_a and linear.trains_b):
        return type(self).forward(self, x, *args, **named)
    tables = (linear.tables or _NO_TABLES).arguments()
    return _AdaptedLinear.apply(x, linear.a, linear.b, linear.scale, linear.weight, linear.bias, *tables)


#: Types of Dynamo guards that may fail for another layer or another call.
_CHECKED_GUARDS = ("TENSOR_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH", "SEQUENCE_LENGTH", "DUPLICATE_INPUT")


def compile_layers(layers: list[nn.Module]) -> None:
    """Compile the layers' forward for training; layers of one structure share code. Configures torch for the whole process."""
    set_compiler()
    call_bodies(BODIES)
    torch._dynamo.reset()  # with few guards, code of another model's layers could be reused for these layers
    # the dropped guards are the ones that tell structures apart, so drop them only if all layers have the same structure
    options: Any = {"guard_filter_fn": _checked} if len(set(map(_structure, layers))) == 1 else None
    compiled = {kind: torch.compile(kind.forward, options=options) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, compiled[type(layer)])  # type: ignore[method-assign]


def _structure(layer: nn.Module) -> tuple[Any, ...]:
    # fixed for the whole run, but may differ between layers
    return tuple((name, type(module), tuple(vars(module))) for name, module in layer.named_modules())


def _checked(guards: Sequence[Any]) -> list[bool]:
    # in each call, inputs, tensors and plain values are checked, such as whether adapters are active. Most other guards ask
    # whether modules and functions are unchanged: nothing changes them in a run.
    return [guard.guard_type in _CHECKED_GUARDS or not (guard.is_global or "self" in guard.name) for guard in guards]


def undo_compiling(layers: list[nn.Module]) -> None:
    """Restore the uncompiled forward."""
    for layer in layers:
        if getattr(vars(layer).get("forward"), "func", None) is _forward:
            del layer.forward


def _forward(layer: nn.Module, compiled: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    # generation and held-out examples have too many shapes to compile
    if not layer.training:
        return type(layer).forward(layer, hidden, *args, **kwargs)
    require_gradient(hidden)
    # lengths as sizes of empty tensors: the compiler would make a number a constant of the graph, and compile again for another
    kwargs |= {name: torch.empty(kwargs[name], 0) for name in ("max_length_q", "max_length_k") if kwargs.get(name)}
    maybe_mark_dynamic(hidden, 1)
    for tensor in _tensors(*args, *kwargs.values()):
        # boundaries of packed examples, and the empty tensors
        is_list = tensor.dim() == 1 or not tensor.numel()
        dims = [0] if is_list else [dim for dim, size in enumerate(tensor.shape) if size == hidden.shape[1]]
        maybe_mark_dynamic(tensor, dims)
    return compiled(layer, hidden, *args, **kwargs)


def _tensors(*values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(*value)


class _FirstLayerInputs(Exception):  # noqa: N818 - ends a forward pass
    """Carries the first layer's inputs."""


def compile_problem(layers: list[nn.Module], run_forward: Callable[[], Any]) -> str:
    """Return why the layers can't be compiled, forward and backward; empty if they can."""

    def stop(_layer: nn.Module, args: Any, kwargs: Any) -> None:
        raise _FirstLayerInputs(args, kwargs)

    # the first recomputed layer and the first other layer
    tested_layers = {getattr(layer, "gradient_checkpointing", False): layer for layer in reversed(layers)}.values()
    hook = layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    breaks_before = Counter(counters["graph_break"])
    try:
        # restores the random states; `finally` removes the gradients
        with torch.random.fork_rng(enabled=True):
            try:
                run_forward()
            except _FirstLayerInputs as inputs:
                (hidden, *args), kwargs = inputs.args
            hook.remove()
            with raising_compiler_errors():
                for layer in tested_layers:
                    out = layer(hidden.detach(), *args, **kwargs)
                    out = out[0] if isinstance(out, tuple) else out
                    out.backward(torch.zeros_like(out))
    except Exception as error:  # noqa: BLE001 - whatever the compiler can't do, the run can without
        error = getattr(error, "inner_exception", error)  # the error of a compiler behind Dynamo
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
    finally:
        hook.remove()
        for parameter in (parameter for layer in tested_layers for parameter in layer.parameters()):
            parameter.grad = None
    breaks = counters["graph_break"] - breaks_before
    return f"the graph breaks in {breaks.total()} places: {next(iter(breaks)).splitlines()[0][:200]}" if breaks else ""


@dataclass
class Compilations:
    """Counts of torch's compilations in this process."""

    graphs: int = 0
    #: Graphs compiled again for other inputs.
    recompiles: int = 0
    graph_breaks: int = 0
    compile_s: float = 0.0
    #: Reasons of recompilations.
    reasons: tuple[str, ...] = ()

    def update(self) -> bool:
        """Add the compilations since the last call. Return whether there were any."""
        graphs = get_compilation_metrics()
        clear_compilation_metrics()
        for graph in graphs:
            # a graph without a name is a backward pass, compiled later; the id ends with the number of recompilations
            is_new, reason = graph.co_name is not None, (graph.recompile_reason or "").strip()
            self.graphs += is_new
            self.recompiles += is_new and not str(graph.compile_id).endswith("/0")
            self.compile_s += graph.entire_frame_compile_time_s or 0.0
            self.reasons += (reason,) if reason and reason not in self.reasons else ()
        self.graph_breaks = counters["graph_break"].total()
        return bool(graphs)
