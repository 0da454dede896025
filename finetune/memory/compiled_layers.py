"""Activations saved by a compiled decoder layer: the compiler's partitioner splits its graph on fake tensors."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from finetune.compat.torch import ACTIVATION_BUDGET, RecomputePolicy, split_by_compiler
from finetune.layers.checkpointing import keep_attention, require_gradient
from finetune.memory.forecast import UNCOMPILABLE

#: (dictionary, key) in which a module stores a tensor.
_Slot = tuple[dict[str, Any], str]
_Function = Callable[..., Any]
#: aten operators that the compiler does not fuse, and parts of such operators' names. The compiler fuses elementwise operators
#: and reductions; a tensor that only fused kernels read is never in memory (torch/_inductor/scheduler.py).
_UNFUSED = {"mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "convolution", "convolution_backward", "sort", "topk"}
_UNFUSED_PARTS = ("attention", "attn")


# `torch.compile` traces a layer's forward and backward into one graph, which its partitioner splits: the forward part saves
# some tensors for the backward part, which recomputes the others. The same partitioner runs here, without Dynamo and code
# generation. A dry run executes both parts operator by operator: saved tensors are exact, temporary tensors an upper bound,
# because a fused kernel writes fewer.
class SplitLayers:
    """Decoder layers split as the compiler would split them; layers of one kind and input shape share a split."""

    def __init__(self, layers: list[nn.Module], *, selective: bool) -> None:
        # `selective`: recomputed layers save attention's outputs; `problem`: why a layer runs unsplit
        self.selective, self.problem = selective, ""
        self._split_functions: dict[Any, _Function | None] = {}
        for layer in layers:
            layer.forward = functools.partial(self._run, layer)  # type: ignore[method-assign]

    @property
    def notes(self) -> tuple[str, ...]:
        return (f"{UNCOMPILABLE} ({self.problem}); the forecast is for uncompiled layers",) if self.problem else ()

    def _run(self, layer: nn.Module, hidden: Tensor, *others: Any, **kwargs: Any) -> Any:
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
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        constants = tuple(repr(leaf) for leaf in leaves if not isinstance(leaf, Tensor))
        slots = list(_slots(layer))
        states = list({id(owner[key]): owner[key] for owner, key in slots}.values())  # tied tensors once
        shapes = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in (*inputs, *states))
        split_key = (type(layer), budget, str(spec), constants, shapes)
        if split_key not in self._split_functions:
            function = _as_function(forward, slots, states, leaves, spec)
            self._split_functions[split_key] = self._split(function, inputs, states, slots, budget, policy)
        split_function = self._split_functions[split_key]
        if split_function is None:
            return forward(*args, **kwargs)
        out = split_function(*inputs, *states)
        return tuple(out) if isinstance(out, list) else out  # aot_function returns a list for a tuple

    def _split(
        self, function: _Function, inputs: list[Any], states: list[Any], slots: list[_Slot],
        budget: float, policy: RecomputePolicy | None,
    ) -> _Function | None:  # fmt: skip
        parameter_indices = [index for index, value in enumerate([*inputs, *states]) if isinstance(value, nn.Parameter)]
        before = [owner[key] for owner, key in slots]
        try:
            with _disable_current_modes(), functorch.patch(activation_memory_budget=budget):
                split_function = split_by_compiler(function, parameter_indices, policy, FusedGraph)
                # a trace keeps its inputs alive, so trace other tensors of their shapes
                examples = (x.new_empty_strided(x.shape, x.stride()).requires_grad_(x.requires_grad) for x in inputs)
                split_function(*examples, *states)
        except Exception as error:  # noqa: BLE001 - the compiler leaves alone whatever it can't trace
            self.problem = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:200]}"
            return None
        finally:
            _set_slots(slots, before)
        return split_function


def _as_function(forward: _Function, slots: list[_Slot], states: list[Any], leaves: list[Any], spec: Any) -> _Function:
    """Return the layer as a function of its input tensors, parameters and buffers."""
    index_of = {id(tensor): index for index, tensor in enumerate(states)}
    slot_indices = [index_of[id(owner[key])] for owner, key in slots]
    quant_states = [getattr(tensor, "quant_state", None) for tensor in states]
    is_tensor = [isinstance(leaf, Tensor) for leaf in leaves]
    input_count = sum(is_tensor)
    constants = [None if tensor else leaf for tensor, leaf in zip(is_tensor, leaves, strict=True)]

    def function(*tensors: Any) -> Any:
        inputs, traced_states = iter(tensors[:input_count]), tensors[input_count:]
        for tensor, quant_state in zip(traced_states, quant_states, strict=True):
            if quant_state is not None:
                tensor.quant_state = quant_state
        # not restored here: the backward of bitsandbytes' product, traced after the layer, reads its quantisation state there
        _set_slots(slots, [traced_states[index] for index in slot_indices])
        arguments = [next(inputs) if tensor else constant for tensor, constant in zip(is_tensor, constants, strict=True)]
        args, kwargs = tree_unflatten(arguments, spec)
        return forward(*args, **kwargs)

    return function


def _slots(layer: nn.Module) -> Iterator[_Slot]:
    for module in layer.modules():
        for tensors_by_name in (module._parameters, module._buffers):
            yield from ((tensors_by_name, key) for key, value in tensors_by_name.items() if value is not None)
        quant_state = getattr(module._parameters.get("weight"), "quant_state", None)
        while quant_state is not None:
            attributes = vars(quant_state)
            yield from ((attributes, key) for key, value in attributes.items() if isinstance(value, Tensor))
            quant_state = quant_state.state2  # of nested quantisation


def _set_slots(slots: list[_Slot], values: list[Any]) -> None:
    for (owner, key), value in zip(slots, values, strict=True):
        owner[key] = value


class FusedGraph:
    """Graph of a compiled function, forward or backward; a call empties its list of inputs."""

    _boxed_call = True  # tells AOTAutograd to pass a list of inputs

    def __init__(self, module: GraphModule) -> None:
        self._nodes = list(module.graph.nodes)
        self._written: set[Node] = set()  # outputs of fused kernels
        self._reads_by_node: dict[Node, set[Node]] = {}

    def __call__(self, inputs: list[Any]) -> Any:
        values: dict[Node, Any] = dict(zip((node for node in self._nodes if node.op == "placeholder"), inputs, strict=True))
        inputs.clear()
        read = functools.partial(_value_of, values)
        for step, dead in self._steps:
            if isinstance(step, list):
                for node in step:
                    values[node] = fake = node.meta["val"]
                    if isinstance(fake, Tensor):
                        values[node] = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)
            elif step.op == "output":
                return map_arg(step.args[0], read)
            else:
                args, kwargs = map_arg((step.args, step.kwargs), read)
                out = step.target(*args, **kwargs)
                items = [user for user in step.users if _is_getitem(user)]
                values.update({item: out[item.args[1]] for item in items} if items else {step: out})
                del out, args, kwargs
            for node in dead:
                values.pop(node, None)
        raise AssertionError("a graph ends with its output")

    @functools.cached_property
    def _steps(self) -> list[tuple[Any, list[Node]]]:
        # a fused kernel, as the list of nodes it writes, or an unfused operator; and the nodes that no later step reads
        unfused = [node for node in self._nodes if node.op == "output" or _runs_unfused(node)]
        inputs = {operator: [_viewed_node(node) for node in operator.all_input_nodes] for operator in unfused}
        self._written = {node for nodes in inputs.values() for node in nodes if _is_fused(node)}  # for _reads, _add_kernel
        available = {node for node in self._nodes if node.op in ("placeholder", "get_attr")}
        steps: list[Any] = []
        for operator in unfused:
            for node in inputs[operator]:
                self._add_kernel(node, available, steps)
            steps.append(operator)
            available |= {operator, *(user for user in operator.users if _is_getitem(user))}
        last_reads: dict[Node, int] = {}
        for index, step in enumerate(steps):
            reads = set().union(*map(self._reads, step)) if isinstance(step, list) else inputs[step]
            last_reads |= dict.fromkeys(reads, index)
        dead: list[list[Node]] = [[] for _ in steps]
        for node, index in last_reads.items():
            dead[index].append(node)
        return list(zip(steps, dead, strict=True))

    def _add_kernel(self, node: Node, available: set[Node], steps: list[Any]) -> None:
        """Add the kernel that writes `node`, with other nodes of its size that read some of the same buffers."""
        if node in available:
            return
        reads = self._reads(node)
        for source in sorted(reads - available, key=self._nodes.index):
            self._add_kernel(source, available, steps)
        size = node.meta["val"].numel()
        others = [
            other for other in self._nodes
            if other in self._written - available - {node} and other.meta["val"].numel() == size
            and self._reads(other) <= available and self._reads(other) & reads
        ]  # fmt: skip
        steps.append([node, *others])
        available |= {node, *others}

    def _reads(self, node: Node) -> set[Node]:
        """Return the buffers that a node's kernel reads: inputs, and outputs of kernels and unfused operators."""
        if node not in self._reads_by_node:
            reads: set[Node] = set()
            for source in map(_viewed_node, node.all_input_nodes):
                reads |= self._reads(source) if _is_fused(source) and source not in self._written else {source}
            self._reads_by_node[node] = reads
        return self._reads_by_node[node]


def _value_of(values: dict[Node, Any], node: Node) -> Any:
    if node in values:
        return values[node]
    args, kwargs = map_arg((node.args, node.kwargs), functools.partial(_value_of, values))
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _viewed_node(node: Node) -> Node:
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _is_getitem(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _is_view(node: Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info and not result.alias_info.is_write for result in schema.returns)


def _runs_unfused(node: Node) -> bool:
    if node.op != "call_function" or _is_getitem(node):
        return False
    # the compiler can't fuse operators of other namespaces
    if getattr(node.target, "namespace", "") not in ("aten", "prims"):
        return True
    name = getattr(node.target, "__name__", "").partition(".")[0]
    return name in _UNFUSED or any(part in name for part in _UNFUSED_PARTS)


def _is_fused(node: Node) -> bool:
    return node.op == "call_function" and not (_runs_unfused(node) or _is_view(node) or _is_getitem(node))
