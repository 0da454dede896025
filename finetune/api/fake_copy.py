"""A copy of a model on fake tensors: the same modules, hooks and quantised layers, without a byte of weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from finetune.memory.fake_model import layer_number

if TYPE_CHECKING:
    from finetune.memory.tracker import StorageTracker


class _Copies(dict[int, Any]):
    """What `copy.deepcopy` takes for an object, by its id."""

    def __init__(self, *, keep_meta: bool) -> None:
        super().__init__()
        self._keep_meta = keep_meta

    def empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """An uninitialised tensor of the same layout, on the forecast's device."""
        device = "meta" if tensor.is_meta and self._keep_meta else "cpu"
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def fake_copy(model: torch.nn.Module, tracker: StorageTracker) -> torch.nn.Module:
    """A deep copy of `model` whose tensors are made inside the tracker's fake tensors, tagged as weights or adapters.

    `model` itself is not changed. Tensors on meta (offloaded weights) stay there, unless all are: a model without weights.
    """
    memo = _Copies(keep_meta=not all(parameter.is_meta for parameter in model.parameters()))
    tracker.recording.begin("load")
    trains = any("lora_" in name for name, _ in model.named_parameters())
    for name, parameter in model.named_parameters():
        part = "adapters" if trains and parameter.requires_grad else "weights"
        tracker.layer = layer_number(name)
        with tracker.tagging(part):
            _copy_parameter(parameter, memo)
        if part == "weights":
            tracker.recording.weights[tracker.layer] += parameter.nbytes
    with tracker.tagging("weights"):
        for buffer in model.buffers():
            _copy_tensor(buffer, memo)
        for module in model.modules():
            for value in vars(module).values():
                _copy_tensors_of(value, memo)
    tracker.layer = None
    copied: Any = copy.deepcopy(model, memo)
    if "_original_forward" in vars(copied):  # accelerate's forward is a closure over the original's
        copied.forward = copied._original_forward
    return copied  # type: ignore[no-any-return]


def _copy_parameter(parameter: torch.nn.Parameter, memo: _Copies) -> None:
    if id(parameter) in memo:  # shared
        return
    copied = torch.nn.Parameter(memo.empty(parameter), requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        _copy_tensors_of(value, memo)
        setattr(copied, name, copy.deepcopy(value, memo))
    memo[id(parameter)] = copied


def _copy_tensors_of(value: Any, memo: _Copies) -> None:
    """Tensors of an attribute: itself, in a list, or those of a quantisation state and the states in it."""
    for tensor in _tensors_of(value):
        _copy_tensor(tensor, memo)


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_of(item)
    elif type(value).__name__ == "QuantState":
        for item in vars(value).values():
            yield from _tensors_of(item)


def _copy_tensor(tensor: torch.Tensor, memo: _Copies) -> None:
    if id(tensor) not in memo:
        memo[id(tensor)] = memo.empty(tensor)
