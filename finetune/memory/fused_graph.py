"""Execution of an operator graph with a compiler's buffers: one per output of a fused kernel."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

#: aten operators that the compiler does not fuse, and parts of further operators' names. It fuses elementwise operators and
#: reductions between them; a tensor that only a fused kernel reads is never in memory (torch/_inductor/scheduler.py).
_UNFUSED = {"mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "convolution", "convolution_backward", "sort", "topk"}
_UNFUSED_PARTS = ("attention", "attn")


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
