"""Activations saved by a compiled decoder layer: the compiler's partitioner splits its graph on fake tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config as functorch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from finetune.compat.torch import ACTIVATION_BUDGET, RecomputePolicy, split_by_compiler
from finetune.layers.checkpointing import keep_attention, require_gradient
from finetune.memory.forecast import UNCOMPILABLE
from finetune.memory.fused_graph import FusedGraph

#: (dictionary, key) of a tensor of a module.
_Slot = tuple[dict[str, Any], str]


# `torch.compile` traces a layer's forward and backward into one graph, which its partitioner splits: the forward part saves
# outputs for the backward part, all else is recomputed. The same partitioner runs here, without Dynamo and code generation.
# A dry run executes both parts operator by operator: saved tensors are exact, temporary tensors an upper bound, as a fused
# kernel writes fewer.
class SplitLayers:
    """Decoder layers split as the compiler would split them; layers of one kind and input shape share a split."""

    def __init__(self, *, selective: bool) -> None:
        # selective: recomputed layers save attention's outputs; problem: why a layer runs unsplit
        self.selective, self.problem = selective, ""
        self._splits: dict[Any, Callable[..., Any] | None] = {}

    def replace(self, layers: list[torch.nn.Module]) -> None:
        for layer in layers:
            layer.forward = functools.partial(self._run, layer)  # type: ignore[method-assign]

    @property
    def notes(self) -> tuple[str, ...]:
        if not self.problem:
            return ()
        return (f"{UNCOMPILABLE} ({self.problem}); the forecast is for uncompiled layers",)

    def _run(self, layer: torch.nn.Module, hidden: torch.Tensor, *others: Any, **kwargs: Any) -> Any:
        forward = functools.partial(type(layer).forward, layer)
        if not torch.is_grad_enabled():
            return forward(hidden, *others, **kwargs)
        require_gradient(hidden)
        budget, policy = ACTIVATION_BUDGET, None
        if layer.gradient_checkpointing:  # checkpointing is inside the layer's forward; split only the recomputed part
            forward = functools.partial(inspect.unwrap(type(layer).forward), layer)
            budget, policy = (1.0, keep_attention) if self.selective else (0.0, None)
        args = (hidden, *others)
        leaves, spec = tree_flatten((args, kwargs))
        inputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        slots = list(_slots(layer))
        tensors = list({id(owner[key]): owner[key] for owner, key in slots}.values())
        unlike = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, torch.Tensor))
        like = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in (*inputs, *tensors))
        kind = (type(layer), budget, str(spec), unlike, like)
        if kind not in self._splits:
            call = _as_function(forward, slots, tensors, leaves, spec)
            self._splits[kind] = self._split(call, inputs, tensors, slots, budget, policy)
        split = self._splits[kind]
        if split is None:
            return forward(*args, **kwargs)
        out = split(*inputs, *tensors)
        return tuple(out) if isinstance(out, list) else out  # aot_function returns a list for a tuple

    def _split(
        self,
        call: Callable[..., Any],
        inputs: list[torch.Tensor],
        tensors: list[Any],
        slots: list[_Slot],
        budget: float,
        policy: RecomputePolicy | None,
    ) -> Callable[..., Any] | None:
        values = [*inputs, *tensors]
        parameter_indices = [index for index, value in enumerate(values) if isinstance(value, torch.nn.Parameter)]
        own = [owner[key] for owner, key in slots]
        try:
            with _disable_current_modes(), functorch.patch(activation_memory_budget=budget):
                split = split_by_compiler(call, parameter_indices, policy, FusedGraph)
                # a trace keeps its inputs, so it is given others
                examples = (x.new_empty_strided(x.shape, x.stride()).requires_grad_(x.requires_grad) for x in inputs)
                split(*examples, *tensors)
        except Exception as error:  # noqa: BLE001 - the compiler leaves alone whatever it can't trace
            self.problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
            return None
        finally:
            _set_slots(slots, own)
        return split


def _as_function(
    forward: Callable[..., Any], slots: list[_Slot], tensors: list[Any], leaves: list[Any], spec: Any
) -> Callable[..., Any]:
    """Return the layer as a function of its inputs, parameters and buffers."""
    index_of = {id(tensor): index for index, tensor in enumerate(tensors)}
    slot_indices = [index_of[id(owner[key])] for owner, key in slots]
    states = [getattr(tensor, "quant_state", None) for tensor in tensors]
    is_input = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    others, count = [None if of_call else leaf for of_call, leaf in zip(is_input, leaves, strict=True)], sum(is_input)

    def call(*values: Any) -> Any:
        layer_inputs, own = iter(values[:count]), values[count:]
        for value, state in zip(own, states, strict=True):
            if state is not None:
                value.quant_state = state
        # left in place: the backward of bitsandbytes' product, traced after the layer, reads its quantisation state there
        _set_slots(slots, [own[index] for index in slot_indices])
        own_leaves = [next(layer_inputs) if of_call else leaf for of_call, leaf in zip(is_input, others, strict=True)]
        args, kwargs = tree_unflatten(own_leaves, spec)
        return forward(*args, **kwargs)

    return call


def _slots(layer: torch.nn.Module) -> Iterator[_Slot]:
    for module in layer.modules():
        for tensors_by_name in (module._parameters, module._buffers):
            yield from ((tensors_by_name, key) for key, value in tensors_by_name.items() if value is not None)
        state = getattr(module._parameters.get("weight"), "quant_state", None)
        while state is not None:
            yield from ((vars(state), key) for key, value in vars(state).items() if isinstance(value, torch.Tensor))
            state = state.state2


def _set_slots(slots: list[_Slot], values: list[Any]) -> None:
    for (owner, key), value in zip(slots, values, strict=True):
        owner[key] = value
