"""Context of a dry run: fake tensors, small tensors with values, CUDA's code paths, a fast reference of delta nets."""

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
from finetune.model.hybrid import falls_back_to_torch

#: Chunks of a delta net's reference that a dry run computes; long rows have hundreds. The backward pass peaks in the third.
CHUNKS_RUN = 3
#: Elements of the largest tensor computed with values: a mask of 4,096 x 4,096 tokens.
MAX_ELEMENTS = 2**24
#: Operators that take masks as indices, so that the shape of their output depends on values.
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")
#: Operators whose floating-point output is also computed: interpolated positions.
_RANGES = ("aten::arange", "aten::linspace")


@contextmanager
def fake_tensors(
    model: Any, capability: Capability | None, trained_tokens: int, packed: bool
) -> Iterator[CudaFunctions | None]:
    """Temporarily create fake tensors and run `model` as on a GPU of this compute capability, or on the CPU (None)."""
    is_card = capability is not None and sys.platform != "win32"
    with (
        own_quantisation_maps(),
        fake_experts(),
        replaced_kernels(model, functools.partial(_call_kernel, capability)),
        card_semantics(trained_tokens) if is_card else nullcontext() as semantics,
        nullcontext() if packed else without_packing_detection(),
        fake_tensor_mode(),
    ):
        yield semantics


def _call_kernel(capability: Capability | None, function: Any, closure: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    if closure["is_new_implementation"] and not falls_back_to_torch(closure["package"], capability):
        return function(*args, **kwargs)
    reference = function.__wrapped__
    if closure["func_name"] == "chunk_gated_delta_rule" and torch.is_autocast_enabled("cpu"):
        return _call_shortened(reference, *args, **kwargs)
    return reference(*args, **kwargs)


def _call_shortened(rule: Any, query: Any, key: Any, value: Any, *, chunk_size: int = 64, **kwargs: Any) -> Any:
    """Call a delta rule for its first chunks only; its initial state saves the other chunks' bytes."""
    rows, tokens, heads, value_dim = value.shape
    key_dim, chunks = key.shape[3], -(-tokens // chunk_size)
    if chunks > CHUNKS_RUN:
        # bytes that autograd saves for a chunk: the state in fp32; in bf16 the state twice, query, key, decayed key, twice the
        # new values, and the attention within the chunk
        chunk_bytes = 8 * key_dim * value_dim + 6 * chunk_size * key_dim + 4 * chunk_size * value_dim + 2 * chunk_size**2
        # the first chunk run saves its query and decayed key as well, because its state has a gradient
        saved_bytes = rows * heads * ((chunks - CHUNKS_RUN) * chunk_bytes - 4 * chunk_size * key_dim)
        kwargs["initial_state"] = _FirstState((rows, heads, key_dim, value_dim), saved_bytes)
        # a copy of the rule, whose `range` shortens the loop over chunks
        short = {"range": lambda *bounds: range(CHUNKS_RUN) if bounds in ((chunks,), (0, chunks)) else range(*bounds)}
        rule = FunctionType(rule.__code__, {**rule.__globals__, **short}, None, rule.__defaults__, rule.__closure__)
    return rule(query, key, value, chunk_size=chunk_size, **kwargs)


class _FirstState(NamedTuple):
    """A state of zeros, allocated when the rule converts its dtype: after the products of all chunks."""

    shape: tuple[int, ...]
    saved_bytes: int

    def to(self, values: torch.Tensor) -> torch.Tensor:
        state = values.new_zeros(self.shape)
        return _SaveBytes.apply(state, values, self.saved_bytes) if values.requires_grad else state


class _SaveBytes(torch.autograd.Function):
    """Save `size` bytes until the backward pass of `tensor`, which depends on `values`."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, values: torch.Tensor, size: int) -> torch.Tensor:
        ctx.save_for_backward(torch.empty(size, dtype=torch.uint8))
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        return None, None, None


# A vision tower splits its patches by image sizes, and a language model computes positions from token types, both in Python.
# Fake tensors lack these values. Weights stay fake.
class SmallValues(TorchDispatchMode):
    """Inside a fake tensor mode, compute small outputs of operators whose arguments have values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if any(type(tensor) is FakeTensor or tensor.is_meta for tensor in tensors):
            if func.name().partition(".")[0] in _INDEXING:
                args = (args[0], _masks_to_positions(args[1]), *args[2:])
            return func(*args, **kwargs)
        are_small = sum(tensor.numel() for tensor in tensors) <= MAX_ELEMENTS
        needs_values = are_small if tensors else _creates_positions(func, args, kwargs)
        with unset_fake_temporarily() if needs_values else nullcontext():
            return func(*args, **kwargs)


def _masks_to_positions(indices: Any) -> list[Any]:
    positions: list[Any] = []
    for index in indices:
        if isinstance(index, torch.Tensor) and type(index) is not FakeTensor and index.dtype is torch.bool:
            with unset_fake_temporarily():
                positions += index.nonzero(as_tuple=True)
        else:
            positions.append(index)
    return positions


def _creates_positions(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    out = func(*args, **kwargs)
    if not isinstance(out, torch.Tensor) or out.is_meta or out.numel() > MAX_ELEMENTS:
        return False
    return not out.is_floating_point() or func.name().partition(".")[0] in _RANGES
