"""Surroundings of a dry run: fake tensors, small ones with values, CUDA's code paths, a fast reference of delta nets."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from finetune.compat.bitsandbytes import own_quantisation_maps
from finetune.compat.torch import fake_tensor_mode
from finetune.compat.transformers import fake_experts, replaced_kernels, without_packing_detection
from finetune.memory.card_semantics import CudaFunctions, card_semantics
from finetune.memory.rules import Capability
from finetune.model.hybrid import takes_reference

#: Chunks in the loop of the reference in a dry run: long rows have hundreds. The peak of the backward is in its third.
STEPS = 3
#: Elements of the largest computed tensor: a mask of 4,096 x 4,096 tokens.
MOST_ELEMENTS = 2**24
#: Operators that take masks as indices: the shape of their result depends on the values.
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")
#: Operators whose floating-point result is also computed: interpolated positions.
_RANGES = ("aten::arange", "aten::linspace")


@contextmanager
def fake_tensors(
    model: Any, capability: Capability | None, trained_tokens: int, packed: bool
) -> Iterator[CudaFunctions | None]:
    """Make tensors fake and run `model` as on a GPU of this compute capability, or on the CPU (None)."""
    is_card = capability is not None and sys.platform != "win32"
    with (
        own_quantisation_maps(),
        fake_experts(),
        replaced_kernels(model, functools.partial(_forecast, capability)),
        card_semantics(trained_tokens) if is_card else nullcontext() as semantics,
        nullcontext() if packed else without_packing_detection(),
        fake_tensor_mode(),
    ):
        yield semantics


def _forecast(capability: Capability | None, function: Any, facts: dict[str, Any], *inputs: Any, **named: Any) -> Any:
    if facts["is_new_implementation"] and not takes_reference(facts["package"], capability):
        return function(*inputs, **named)
    is_long = facts["func_name"] == "chunk_gated_delta_rule" and torch.is_autocast_enabled("cpu")
    return (functools.partial(_shortened, function.__wrapped__) if is_long else function.__wrapped__)(*inputs, **named)


def _shortened(rule: Any, query: Any, key: Any, value: Any, *, chunk_size: int = 64, **named: Any) -> Any:
    """Call `rule` with a loop over its first `STEPS` chunks. Its first state saves one block for the other chunks."""
    (rows, tokens, heads, depth), width = value.shape, key.shape[3]
    chunks = -(-tokens // chunk_size)
    if chunks > STEPS:
        # what autograd saves in a step: the state in float32; in bf16 the state twice, query, key, decayed key, twice the new
        # values, and the attention within the chunk
        step = 8 * width * depth + 6 * chunk_size * width + 4 * chunk_size * depth + 2 * chunk_size**2
        # the first step saves its query and decayed key as well, because its state has a gradient
        saved_bytes = rows * heads * ((chunks - STEPS) * step - 4 * chunk_size * width)
        named["initial_state"] = _FirstState((rows, heads, width, depth), saved_bytes)
        short = {"range": lambda *bounds: range(STEPS) if bounds in ((chunks,), (0, chunks)) else range(*bounds)}
        rule = FunctionType(rule.__code__, {**rule.__globals__, **short}, None, rule.__defaults__, rule.__closure__)
    return rule(query, key, value, chunk_size=chunk_size, **named)


class _FirstState(NamedTuple):
    """A state of zeros, allocated where the rule converts it: after the products of all chunks."""

    shape: tuple[int, ...]
    saved_bytes: int

    def to(self, values: torch.Tensor) -> torch.Tensor:
        state = values.new_zeros(self.shape)
        return _Saved.apply(state, values, self.saved_bytes) if values.requires_grad else state


class _Saved(torch.autograd.Function):
    """Save `size` bytes until the backward of a tensor, which depends on `values`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(size, dtype=torch.uint8))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        return None, None, None


# A vision tower splits its patches by image sizes, and a language model makes positions from token types, both in Python.
# Fake tensors lack these values. Weights stay fake.
class SmallValues(TorchDispatchMode):
    """Inside a fake tensor mode, compute small results of operators whose arguments have values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(type(tensor) is FakeTensor or tensor.is_meta for tensor in tensors):
            if func.name().partition(".")[0] in _INDEXING:
                args = (args[0], _as_positions(args[1]), *args[2:])
            return func(*args, **kwargs)
        is_small = sum(tensor.numel() for tensor in tensors) <= MOST_ELEMENTS
        computes = is_small if tensors else _makes_integers(func, args, kwargs)
        with unset_fake_temporarily() if computes else nullcontext():
            return func(*args, **kwargs)


def _as_positions(indices: Any) -> list[Any]:
    positions: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and type(index) is not FakeTensor and index.dtype is torch.bool:
            with unset_fake_temporarily():
                positions += index.nonzero(as_tuple=True)
        else:
            positions.append(index)
    return positions


def _makes_integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    out = func(*args, **kwargs)
    if not isinstance(out, torch.Tensor) or out.is_meta or out.numel() > MOST_ELEMENTS:
        return False
    return not out.is_floating_point() or func.name().partition(".")[0] in _RANGES
