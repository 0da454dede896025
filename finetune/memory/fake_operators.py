"""Memo of the outputs of operators on fake tensors, by operator, argument shapes, strides, dtypes and shared storages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from finetune.compat.torch import fake_tensor

#: Signatures memoised before this memo and torch's cache are cleared. A step of a few layers has some 300.
MAX_MEMOISED = 20_000
#: Tags of operators whose outputs depend on data, or that change a view in place.
_EXCLUDED_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
#: Namespaces of operators whose outputs depend on shapes alone.
_NAMESPACES = {"aten", "bitsandbytes"}
_PLAIN_TYPES = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}

# Shape inference takes most of a dry run, and layers repeat the same calls. Building these outputs is faster than a look-up in
# torch's own cache of fake tensors.
_Signature = tuple[Any, ...]


class _OutputSpec(NamedTuple):
    #: Number of the argument that is the output, or that shares its storage if there is a `shape`; None: a new tensor.
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
    with torch._C.DisableTorchFunction():  # keeps reads of shapes out of function modes
        signature = _signature(func, args, kwargs, tensors)
    if signature is None:
        return func(*args, **kwargs)
    if signature not in _MEMO:
        out = func(*args, **kwargs)
        if len(_MEMO) >= MAX_MEMOISED:
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
    outputs = [None if spec is None else _build(spec, tensors) for spec in specs]
    return outputs[0] if container is None else container(outputs)


def _signature(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[FakeTensor]) -> _Signature | None:
    if func.namespace not in _NAMESPACES or _EXCLUDED_TAGS.intersection(func.tags):
        return None
    parts: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    first_by_storage: dict[int, int] = {}
    can_memoise = _append_description((args, *kwargs.items()), parts, tensors, first_by_storage)
    return tuple(parts) if can_memoise and tensors else None


def _append_description(values: Any, parts: list[Any], tensors: list[FakeTensor], first_by_storage: dict[int, int]) -> bool:
    """Append the properties that determine the outputs to `parts`; return False if the call can't be memoised."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None:
                return False
            tensors.append(value)
            storage = value.untyped_storage()
            parts += (value.dtype, value.shape, value.stride(), value.storage_offset(), value.fake_device)
            # outputs that alias an argument depend on which arguments share a storage
            parts += (storage.nbytes(), first_by_storage.setdefault(storage._cdata, len(tensors)))
        elif kind in _PLAIN_TYPES:
            parts += (kind, value)  # the type tells 1, 1.0 and True apart, which are equal
        elif kind is list or kind is tuple:
            parts.append(len(value))
            if not _append_description(value, parts, tensors, first_by_storage):
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
        argument_number = next((number for number, tensor in enumerate(tensors) if tensor is leaf), None)
        if argument_number is not None:
            specs.append(_OutputSpec(argument_number))
            continue
        storage = leaf.untyped_storage()._cdata
        source = storages.index(storage) if storage in storages else None
        spec = _OutputSpec(source, leaf.shape, leaf.stride(), int(leaf.storage_offset()), leaf.dtype, leaf.fake_device)
        if not _is_same(_build(spec, tensors), leaf):
            return None
        specs.append(spec)
    new_ids = [leaf.untyped_storage()._cdata for leaf, spec in zip(leaves, specs, strict=True) if spec and spec.source is None]
    if len(set(new_ids)) < len(new_ids):  # outputs share a new storage; `_build` would give each a different one
        return None
    return tuple(specs), type(out) if isinstance(out, (list, tuple)) else None


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


def _is_same(built: FakeTensor, original: FakeTensor) -> bool:
    return (
        torch._C._dispatch_key_set(built) == torch._C._dispatch_key_set(original)
        and vars(built).keys() == vars(original).keys()
        and built.untyped_storage().nbytes() == original.untyped_storage().nbytes()
        and built.storage_offset() == original.storage_offset()
    )
