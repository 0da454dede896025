"""Memo of fake-tensor operator outputs by operator, argument shapes, strides, dtypes and shared storages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from finetune.compat.torch import fake_tensor

#: Signatures memoised, here and in torch's cache, before both are cleared. A step of a few layers has some 300.
MOST_MEMOISED = 20_000
#: Operators whose outputs depend on data, or that change a view in place.
_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
#: Namespaces of operators whose outputs depend on shapes alone.
_NAMESPACES = {"aten", "bitsandbytes"}
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}

# Shape inference takes most of a dry run, and layers repeat the same calls. torch's fake-tensor cache takes longer to look up
# than these outputs take to build.
_Signature = tuple[Any, ...]


class _OutputSpec(NamedTuple):
    """An output: argument `source`, a view of its storage (with `shape`), or a new tensor (None)."""

    source: int | None
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None


#: Signature -> outputs and their container (None: a single tensor); None where outputs can't be memoised.
_MEMO: dict[_Signature, tuple[tuple[_OutputSpec | None, ...], type | None] | None] = {}


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call `func` under a FakeTensorMode, memoised; outputs share storages as torch's do."""
    tensors: list[FakeTensor] = []
    with torch._C.DisableTorchFunction():  # a mode would see each read of a shape
        signature = _signature(func, args, kwargs, tensors)
    if signature is None:
        return func(*args, **kwargs)
    if signature not in _MEMO:
        out = func(*args, **kwargs)
        if len(_MEMO) >= MOST_MEMOISED:
            _MEMO.clear()
            FakeTensorMode.cache_clear()
        # an operator that changes its arguments in place can't be memoised
        unchanged = signature == _signature(func, args, kwargs, [])
        _MEMO[signature] = _output_specs(out, tensors) if unchanged else None
        return out
    memo = _MEMO[signature]
    if memo is None:
        return func(*args, **kwargs)
    specs, container = memo
    results = [None if spec is None else _build(spec, tensors) for spec in specs]
    return results[0] if container is None else container(results)


def _signature(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[FakeTensor]) -> _Signature | None:
    if func.namespace not in _NAMESPACES or _TAGS.intersection(func.tags):
        return None
    parts: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    storages: dict[int, int] = {}
    is_described = _describe((args, *kwargs.items()), parts, tensors, storages)
    return tuple(parts) if is_described and tensors else None


def _describe(values: Any, parts: list[Any], tensors: list[FakeTensor], storages: dict[int, int]) -> bool:
    """Append what outputs depend on to `parts`; return False if the call can't be memoised."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None:
                return False
            tensors.append(value)
            storage = value.untyped_storage()
            shared = storages.setdefault(storage._cdata, len(tensors))
            parts += (value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device)
            # outputs that alias an argument depend on which arguments share a storage
            parts += (storage.nbytes(), shared)
        elif kind in _PLAIN:
            parts += (kind, value)  # 1, 1.0 and True are equal
        elif kind is list or kind is tuple:
            parts.append(len(value))
            if not _describe(value, parts, tensors, storages):
                return False
        else:
            return False
    return True


def _output_specs(out: Any, tensors: list[FakeTensor]) -> tuple[tuple[_OutputSpec | None, ...], type | None] | None:
    leaves = out if isinstance(out, (list, tuple)) else [out]
    storages = [tensor.untyped_storage()._cdata for tensor in tensors]
    specs: list[_OutputSpec | None] = []
    for leaf in leaves:
        if leaf is None:
            specs.append(None)
            continue
        if type(leaf) is not FakeTensor or leaf.constant is not None:
            return None
        spec = _output_spec(leaf, tensors, storages)
        if not _is_same(_build(spec, tensors), leaf):
            return None
        specs.append(spec)
    own = [leaf.untyped_storage()._cdata for leaf, spec in zip(leaves, specs, strict=True) if spec and spec.source is None]
    if len(set(own)) < len(own):
        return None
    return tuple(specs), type(out) if isinstance(out, (list, tuple)) else None


def _output_spec(leaf: FakeTensor, tensors: list[FakeTensor], storages: list[int]) -> _OutputSpec:
    argument = next((number for number, tensor in enumerate(tensors) if tensor is leaf), None)
    if argument is not None:
        return _OutputSpec(argument)
    storage = leaf.untyped_storage()._cdata
    source = storages.index(storage) if storage in storages else None
    return _OutputSpec(source, leaf.shape, leaf.stride(), int(leaf.storage_offset()), leaf.dtype, leaf.fake_device)


def _build(spec: _OutputSpec, tensors: list[FakeTensor]) -> FakeTensor:
    source, shape, stride, offset, dtype, device = spec
    if shape is None:
        return tensors[source]  # type: ignore[index]
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        if source is None:
            values = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            values = torch.empty(0, dtype=dtype, device="meta").set_(tensors[source].untyped_storage(), offset, shape, stride)
        return fake_tensor(tensors[0].fake_mode, values, device)


def _is_same(built: FakeTensor, asked: FakeTensor) -> bool:
    return (
        torch._C._dispatch_key_set(built) == torch._C._dispatch_key_set(asked)
        and vars(built).keys() == vars(asked).keys()
        and built.untyped_storage().nbytes() == asked.untyped_storage().nbytes()
        and built.storage_offset() == asked.storage_offset()
    )
