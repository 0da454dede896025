"""Compiled decoder layers: one graph for all layers of a kind and examples of any length, and torch's compilation counts."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dynamo import maybe_mark_dynamic

from finetune.compat.torch import call_bodies, raising_compiler_errors, set_compiler
from finetune.layers.checkpointing import require_gradient
from finetune.layers.varlen_attention import lengths_as_sizes

#: Types of Dynamo guards that may fail for another layer or another call.
_CHECKED_GUARDS = ("TENSOR_MATCH", "CONSTANT_MATCH", "EQUALS_MATCH", "SEQUENCE_LENGTH", "DUPLICATE_INPUT")


def compile_layers(layers: list[torch.nn.Module]) -> None:
    """Compile the layers' forward for training; layers of one structure share code. Configures torch for the whole process."""
    from finetune.layers.adapted_linear import BODIES

    set_compiler()
    call_bodies(BODIES)
    torch._dynamo.reset()  # with few guards, code of another model's layers could be reused for these layers
    # the dropped guards are the ones that tell structures apart, so drop them only if all layers have the same structure
    options: Any = {"guard_filter_fn": _checked} if len(set(map(_structure, layers))) == 1 else None
    compiled = {kind: torch.compile(kind.forward, options=options) for kind in {type(layer) for layer in layers}}
    for layer in layers:
        layer.forward = functools.partial(_forward, layer, compiled[type(layer)])  # type: ignore[method-assign]


def _structure(layer: torch.nn.Module) -> tuple[Any, ...]:
    # fixed for the whole run, but may differ between layers
    return tuple((name, type(module), tuple(vars(module))) for name, module in layer.named_modules())


def _checked(guards: Sequence[Any]) -> list[bool]:
    # in each call, inputs, tensors and plain values are checked, such as whether adapters are active. Most other guards ask
    # whether modules and functions are unchanged: nothing changes them in a run.
    return [guard.guard_type in _CHECKED_GUARDS or not (guard.is_global or "self" in guard.name) for guard in guards]


def undo_compiling(layers: list[torch.nn.Module]) -> None:
    """Restore the uncompiled forward."""
    for layer in layers:
        if getattr(vars(layer).get("forward"), "func", None) is _forward:
            del layer.forward


def _forward(layer: torch.nn.Module, compiled: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    # generation and held-out examples have too many shapes to compile
    if not layer.training:
        return type(layer).forward(layer, hidden, *args, **kwargs)
    require_gradient(hidden)
    kwargs = lengths_as_sizes(kwargs)
    maybe_mark_dynamic(hidden, 1)
    for tensor in _tensors(*args, *kwargs.values()):
        maybe_mark_dynamic(tensor, _dynamic_dims(tensor, hidden.shape[1]))
    return compiled(layer, hidden, *args, **kwargs)


def _dynamic_dims(tensor: torch.Tensor, tokens: int) -> list[int]:
    # boundaries of packed examples, and lengths as sizes of empty tensors
    if tensor.dim() == 1 or not tensor.numel():
        return [0]
    return [dim for dim, size in enumerate(tensor.shape) if size == tokens]


def _tensors(*values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(*value)


class _FirstLayerInputs(Exception):  # noqa: N818 - ends a forward pass
    """Carries the first layer's inputs."""


def compile_problem(layers: list[torch.nn.Module], run_forward: Callable[[], Any]) -> str:
    """Return why the layers can't be compiled, forward and backward; empty if they can."""

    def stop(_layer: torch.nn.Module, args: Any, kwargs: Any) -> None:
        raise _FirstLayerInputs(args, kwargs)

    # the first recomputed layer and the first other layer
    tested_layers = {getattr(layer, "gradient_checkpointing", False): layer for layer in reversed(layers)}.values()
    hook = layers[0].register_forward_pre_hook(stop, with_kwargs=True)
    breaks_before = _graph_breaks()
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
    breaks = _graph_breaks() - breaks_before
    return f"the graph breaks in {breaks.total()} places: {next(iter(breaks)).splitlines()[0][:200]}" if breaks else ""


def _graph_breaks() -> Counter[str]:
    from torch._dynamo.utils import counters

    return Counter(counters["graph_break"])


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
        from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics

        graphs = get_compilation_metrics()
        clear_compilation_metrics()
        for graph in graphs:
            # a graph without a name is a backward pass, compiled later; the id ends with the number of recompilations
            is_new, reason = graph.co_name is not None, (graph.recompile_reason or "").strip()
            self.graphs += is_new
            self.recompiles += is_new and not str(graph.compile_id).endswith("/0")
            self.compile_s += graph.entire_frame_compile_time_s or 0.0
            self.reasons += (reason,) if reason and reason not in self.reasons else ()
        self.graph_breaks = _graph_breaks().total()
        return bool(graphs)
