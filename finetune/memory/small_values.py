"""A dry run's small tensors with values: positions, masks and image sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

#: Elements of the largest computed tensor: a mask of 4,096 x 4,096 tokens.
MOST_ELEMENTS = 2**24


#: Operators that take masks as indices: the shape of their result depends on the values.
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")
#: Operators whose floating-point result is also computed: interpolated positions.
_RANGES = ("aten::arange", "aten::linspace")


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
        if not tensors and not _makes_integers(func, args, kwargs):
            return func(*args, **kwargs)
        if sum(tensor.numel() for tensor in tensors) > MOST_ELEMENTS:
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _as_positions(indices: Any) -> list[Any]:
    """Replace masks with values by the positions they select."""
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
