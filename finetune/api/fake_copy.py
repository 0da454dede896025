"""A copy of a model on fake tensors: the same modules, hooks and quantised layers, without a byte of weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from finetune.compat.accelerate import undo_prepared_forward
from finetune.memory.fake_model import layer_number
from finetune.memory.tracker import StorageTracker


class _Copies(dict[int, Any]):
    """What `copy.deepcopy` takes for an object, by its id."""

    def __init__(self, *, device: str = "cpu", keep_meta: bool = False) -> None:
        super().__init__()
        self._device, self._keep_meta = device, keep_meta

    def empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor of the same layout, on the forecast's device."""
        device = "meta" if tensor.is_meta and self._keep_meta else self._device
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def fake_copy(model: torch.nn.Module, tracker: StorageTracker) -> torch.nn.Module:
    """A deep copy of `model` whose tensors are made inside the tracker's fake tensors, tagged as weights or adapters.

    `model` itself is not changed. Tensors on meta (offloaded weights) stay there, unless all are: a model without weights.
    """
    copies = _Copies(keep_meta=not all(parameter.is_meta for parameter in model.parameters()))
    tracker.recording.begin("load")
    has_adapters = any("lora_" in name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        part = "adapters" if has_adapters and parameter.requires_grad else "weights"
        tracker.layer = layer_number(name)
        with tracker.tagging(part):
            _copy_parameter(parameter, copies)
        if part == "weights":
            tracker.recording.weights[tracker.layer] += parameter.nbytes
    tracker.layer = None
    with tracker.tagging("weights"):
        return _copy_modules(model, copies)


def meta_copy(model: torch.nn.Module) -> torch.nn.Module:
    """A deep copy of `model` without weights."""
    copies = _Copies(device="meta")
    for parameter in model.parameters():
        _copy_parameter(parameter, copies)
    return _copy_modules(model, copies)


def _copy_modules(model: torch.nn.Module, copies: _Copies) -> torch.nn.Module:
    """The copy of a model whose parameters are copied already."""
    parameters = list(model.parameters())
    for buffer in model.buffers():
        _copy_tensor(buffer, copies)
    for owner in (*model.modules(), *parameters):
        for value in vars(owner).values():
            for tensor in _tensors_of(value):
                _copy_tensor(tensor, copies)
    copied: Any = copy.deepcopy(model, copies)
    for parameter in parameters:  # a 4-bit parameter's attributes are its quantisation and its module
        for name, value in vars(parameter).items():
            setattr(copies[id(parameter)], name, copy.deepcopy(value, copies))
    undo_prepared_forward(copied)  # a closure over the original's
    return copied  # type: ignore[no-any-return]


def _copy_parameter(parameter: torch.nn.Parameter, copies: _Copies) -> None:
    if id(parameter) not in copies:  # else shared
        copies[id(parameter)] = torch.nn.Parameter(copies.empty(parameter), requires_grad=parameter.requires_grad)


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """Tensors of an attribute: itself, in a list, or those of a quantisation state and the states in it."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_of(item)
    elif type(value).__name__ == "QuantState":
        for item in vars(value).values():
            yield from _tensors_of(item)


def _copy_tensor(tensor: torch.Tensor, copies: _Copies) -> None:
    if id(tensor) not in copies:
        copies[id(tensor)] = copies.empty(tensor)
