"""Activations saved by a compiled decoder layer: the compiler's partitioner splits its graph on fake tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config as functorch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from finetune.compat.torch import ACTIVATION_BUDGET, RecomputePolicy, split_by_compiler
from finetune.layers.checkpointing import keep_attention, require_gradient
from finetune.memory.forecast import UNCOMPILABLE

#: (dictionary, key) of a tensor of a module.
_Slot = tuple[dict[str, Any], str]
_Call = Callable[..., Any]
#: aten operators that the compiler does not fuse, and parts of further operators' names. It fuses elementwise operators and
#: reductions between them; a tensor that only a fused kernel reads is never in memory (torch/_inductor/scheduler.py).
_UNFUSED = {"mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "convolution", "convolution_backward", "sort", "topk"}
_UNFUSED_PARTS = ("attention", "attn")


# `torch.compile` traces a layer's forward and backward into one graph, which its partitioner splits: the forward part saves
# outputs for the backward part, all else is recomputed. The same partitioner runs here, without Dynamo and code generation.
# A dry run executes both parts operator by operator: saved tensors are exact, temporary tensors an upper bound, as a fused
# kernel writes fewer.
class SplitLayers:
    """Decoder layers split as the compiler would split them; layers of one kind and input shape share a split."""

    def __init__(self, *, selective: bool) -> None:
        # selective: recomputed layers save attention's outputs; problem: why a layer runs unsplit
        self.selective, self.problem = selective, ""
        self._splits: dict[Any, _Call | None] = {}

    def patch_forwards(self, layers: list[torch.nn.Module]) -> None:
        """Run the split graph of each layer in place of its forward."""
        for layer in layers:
            layer.forward = functools.partial(self._run, layer)  # type: ignore[method-assign]

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"{UNCOMPILABLE} ({self.problem}); the forecast is for uncompiled layers",) if self.problem else ()

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
        call: _Call,
        inputs: list[Any],
        tensors: list[Any],
        slots: list[_Slot],
        budget: float,
        policy: RecomputePolicy | None,
    ) -> _Call | None:
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


def _as_function(forward: _Call, slots: list[_Slot], tensors: list[Any], leaves: list[Any], spec: Any) -> _Call:
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


class FusedGraph:
    """Graph of a compiled function, forward or backward; a call empties its list of inputs."""

    _boxed_call = True

    def __init__(self, module: GraphModule) -> None:
        self._nodes = list(module.graph.nodes)
        self._written: set[Node] = set()  # by a fused kernel
        self._leaves: dict[Node, set[Node]] = {}

    def __call__(self, inputs: list[Any]) -> Any:
        values: dict[Node, Any] = dict(zip((node for node in self._nodes if node.op == "placeholder"), inputs, strict=True))
        inputs.clear()
        read = functools.partial(_value_of, values)
        for step, dead in self._steps:
            if isinstance(step, list):
                for node in step:
                    values[node] = like = node.meta["val"]
                    if isinstance(like, torch.Tensor):
                        values[node] = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
            elif step.op == "output":
                return map_arg(step.args[0], read)
            else:
                args, kwargs = map_arg((step.args, step.kwargs), read)
                out = step.target(*args, **kwargs)
                parts = [user for user in step.users if _is_part(user)]
                values.update({part: out[part.args[1]] for part in parts} if parts else {step: out})
                del out, args, kwargs
            for node in dead:
                values.pop(node, None)
        raise AssertionError("a graph ends with its output")

    @functools.cached_property
    def _steps(self) -> list[tuple[Any, list[Node]]]:
        """Fused kernels, as lists of written nodes, and called operators, each with the nodes that no later step reads."""
        called = [node for node in self._nodes if node.op == "output" or _runs_unfused(node)]
        sources = {step: [_source(node) for node in step.all_input_nodes] for step in called}
        self._written = {node for nodes in sources.values() for node in nodes if _is_fused(node)}
        available = {node for node in self._nodes if node.op in ("placeholder", "get_attr")}
        steps: list[Any] = []
        for step in called:
            for node in sources[step]:
                self._write(node, available, steps)
            steps.append(step)
            available |= {step, *(user for user in step.users if _is_part(user))}
        last: dict[Node, int] = {}
        for index, step in enumerate(steps):
            read = set().union(*map(self._reads, step)) if isinstance(step, list) else sources[step]
            last |= dict.fromkeys(read, index)
        dead: list[list[Node]] = [[] for _ in steps]
        for node, index in last.items():
            dead[index].append(node)
        return list(zip(steps, dead, strict=True))

    def _write(self, node: Node, available: set[Node], steps: list[Any]) -> None:
        """Add the kernel that writes a node, with the nodes that share its reads."""
        if node in available:
            return
        reads = self._reads(node)
        for leaf in sorted(reads - available, key=self._nodes.index):
            self._write(leaf, available, steps)
        size = node.meta["val"].numel()
        others = [
            other for other in self._nodes
            if other in self._written - available - {node} and other.meta["val"].numel() == size
            and self._reads(other) <= available and self._reads(other) & reads
        ]  # fmt: skip
        steps.append([node, *others])
        available |= {node, *others}

    def _reads(self, node: Node) -> set[Node]:
        """Return the buffers that a node's kernel reads: inputs, and outputs of kernels and called operators."""
        if node not in self._leaves:
            leaves: set[Node] = set()
            for source in map(_source, node.all_input_nodes):
                leaves |= self._reads(source) if _is_fused(source) and source not in self._written else {source}
            self._leaves[node] = leaves
        return self._leaves[node]


def _value_of(values: dict[Node, Any], node: Node) -> Any:
    if node in values:
        return values[node]
    args, kwargs = map_arg((node.args, node.kwargs), functools.partial(_value_of, values))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _source(node: Node) -> Node:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_part(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(value.alias_info and not value.alias_info.is_write for value in schema.returns)


def _runs_unfused(node: Node) -> bool:
    if node.op != "call_function" or _is_part(node):
        return False
    # the compiler can't fuse operators of other namespaces
    name = getattr(node.target, "__name__", "").partition(".")[0]
    is_fused = getattr(node.target, "namespace", "") in ("aten", "prims") and name not in _UNFUSED
    return not is_fused or any(part in name for part in _UNFUSED_PARTS)


def _is_fused(node: Node) -> bool:
    return node.op == "call_function" and not (_runs_unfused(node) or _is_view(node) or _is_part(node))
