"""Replacement of a meta model's parameters by fake tensors, in the order of loading onto a GPU."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from finetune.compat.peft import dora_weights
from finetune.compat.transformers import name_in_checkpoint
from finetune.layers.layer_offloading import offloading_of
from finetune.memory.tracker import OFFLOADED, StorageTracker
from finetune.model.adapters import LOADED_ROWS, TRAINED_ROWS, trainable_parameters

#: Attribute of a loaded embedding table: its number of rows, including rows of new tokens.
GROWN_ROWS = "_grown_rows"


def materialise(model: nn.Module, tracker: StorageTracker, *, dtype: torch.dtype) -> None:
    """Replace every meta parameter and buffer by a fake tensor, base weights first. Tied weights stay tied."""
    loading = _Loading(model, tracker, dtype)
    loading.load_base()
    loading.create_adapters()


class _Loading:
    def __init__(self, model: nn.Module, tracker: StorageTracker, dtype: torch.dtype) -> None:
        self._model, self._tracker, self._dtype = model, tracker, dtype
        self._offloading = offloading_of(model)
        self._materialised: dict[int, nn.Parameter] = {}  # by the meta parameter's id
        self._uncast: dict[int, nn.Parameter] = {}  # adapters in the model's dtype

    def load_base(self) -> None:
        self._tracker.recording.begin_part("load")
        self._tracker.phase = "load"
        for path, module, names in _in_loading_order(self._model):
            self._tracker.layer = layer_number(path)
            for name in names:
                if self._materialise(module, name, "weights") and self._offloading is not None:
                    with self._tracker.tagging(OFFLOADED):
                        self._offloading.on_parameter_loaded(module, name)
            with self._tracker.tagging("weights"):
                _materialise_buffers(module)
        self._tracker.layer = None
        with self._tracker.tagging("weights"):
            self._grow_tables()
            if self._offloading is not None:
                self._offloading.finish()

    def create_adapters(self) -> None:
        self._tracker.phase = "adapters"  # in a run a part of loading, like "casts"
        # PEFT creates adapters in the model's dtype, computes DoRA's magnitudes, and at the end casts each to fp32
        self._create_uncast_adapters()
        for path, module in self._model.named_modules():
            self._tracker.layer = layer_number(path)
            for name in list(module._parameters):
                self._materialise(module, name, "adapters")
        self._tracker.layer = None

    def _materialise(self, module: nn.Module, name: str, part: str) -> bool:
        """Return whether the parameter belongs to `part`; if so, replace it."""
        parameter = module._parameters[name]
        if parameter is None or parameter.requires_grad is not (part == "adapters"):
            return False
        with self._tracker.tagging(part):
            weight = self._materialised.get(id(parameter))
            if weight is None:
                weight = self._uncast.pop(id(parameter), None)
                if weight is None or weight.dtype != parameter.dtype:
                    weight = _loaded_parameter(module, name, self._dtype)
                self._materialised[id(parameter)] = weight
                if part == "weights" and self._offloading is None:
                    self._tracker.recording.weights[self._tracker.layer] += weight.nbytes
            module._parameters[name] = weight
        if hasattr(weight, "quant_state"):
            module.quant_state = weight.quant_state
        return True

    def _grow_tables(self) -> None:
        """Replace embedding tables that grow for new tokens, as `grow_vocabulary` does."""
        grown: dict[int, nn.Parameter] = {}
        for module in self._model.modules():
            loaded = module._parameters.get("weight")
            if loaded is None or not hasattr(loaded, GROWN_ROWS):
                continue
            if id(loaded) not in grown:
                table = torch.empty(getattr(loaded, GROWN_ROWS), *loaded.shape[1:], dtype=loaded.dtype)
                grown[id(loaded)] = nn.Parameter(table, requires_grad=False)
            module._parameters["weight"] = grown[id(loaded)]
        self._materialised = {key: grown.get(id(weight), weight) for key, weight in self._materialised.items()}

    def _create_uncast_adapters(self) -> None:
        tracker, uncast = self._tracker, self._uncast
        for path, module in self._model.named_modules():
            layer: Any = module
            for name in getattr(layer, "lora_A", ()):
                tracker.layer = layer_number(path)
                a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
                with tracker.tagging("adapters"):
                    for weight in (a, b):
                        uncast[id(weight)] = nn.Parameter(torch.empty(weight.shape, dtype=self._dtype))
                if name in layer.lora_magnitude_vector:
                    magnitude = layer.lora_magnitude_vector[name]
                    dora = type(magnitude)(magnitude.fan_in_fan_out)
                    base, scaling = layer.get_base_layer(), layer.scaling[name]
                    with tracker.tagging("workspace"):
                        dora.update_layer(base_layer=base, lora_A=uncast[id(a)], lora_B=uncast[id(b)], scaling=scaling)
                    uncast[id(magnitude.weight)] = dora.weight
        tracker.layer = None
        with tracker.tagging("adapters"):
            for name, rows in trainable_parameters(self._model):
                if TRAINED_ROWS in name:
                    uncast[id(rows)] = nn.Parameter(torch.empty(rows.shape, dtype=self._dtype))


def _in_loading_order(model: Any) -> list[tuple[str, nn.Module, list[str]]]:
    # Sorted by name in the checkpoint: the weight loaded last decides the load peak of a quantised model, because it is still
    # in 16 bit when all others are packed.
    # Source: transformers.core_model_loading, convert_and_load_state_dict_in_model.
    name_of = name_in_checkpoint(model.get_base_model())

    def sort_key(path: str) -> list[tuple[int, int, str]]:
        name = name_of(path.removeprefix("base_model.model."))
        return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]  # numbers first, by value

    modules = sorted(model.named_modules(), key=lambda item: sort_key(item[0]))
    return [(path, module, sorted(module._parameters, key=lambda name: sort_key(f"{path}.{name}"))) for path, module in modules]


def cast_adapters_in_turn(model: nn.Module, tracker: StorageTracker, dtypes: Sequence[torch.dtype]) -> None:
    """Cast the adapters, which PEFT creates in fp32, to each of `dtypes` in turn."""
    # a separate phase: with all layers, casts may need more memory than loading, though they need less with a few layers
    tracker.phase = "casts"
    for dtype in dtypes:
        for name, parameter in trainable_parameters(model):
            if "lora_magnitude_vector" not in name and parameter.dtype != dtype:
                tracker.layer = layer_number(name)
                with tracker.tagging("adapters"):
                    parameter.data = parameter.data.to(dtype)
    tracker.layer = None


def layer_number(path: str) -> int | None:
    """Return the decoder layer's index in a module path; None outside the layers."""
    match = re.search(r"\.(?:layers|h|blocks|block)\.(\d+)(?:\.|$)", path)  # the names differ by model type
    return int(match[1]) if match else None


def _materialise_buffers(module: nn.Module) -> None:
    for name, buffer in list(module._buffers.items()):
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    for name, value in list(vars(module).items()):  # such as rotary embeddings' original frequencies
        if isinstance(value, torch.Tensor) and value.is_meta:
            setattr(module, name, torch.empty(value.shape, dtype=value.dtype))


def _loaded_parameter(module: nn.Module, name: str, dtype: torch.dtype) -> nn.Parameter:
    from bitsandbytes.nn import Linear8bitLt, Params4bit

    parameter: Any = module._parameters[name]
    if isinstance(parameter, Params4bit):
        return _packed_4bit(parameter, dtype)
    if name == "weight" and isinstance(module, Linear8bitLt):
        return _packed_8bit(parameter, dtype)
    rows = getattr(parameter, LOADED_ROWS, None)
    shape = parameter.shape if rows is None else (rows, *parameter.shape[1:])
    weight = nn.Parameter(torch.empty(shape, dtype=parameter.dtype), parameter.requires_grad)
    if rows is not None:
        setattr(weight, GROWN_ROWS, parameter.shape[0])
    return weight


def _packed_4bit(parameter: Any, dtype: torch.dtype) -> nn.Parameter:
    from bitsandbytes.functional import quantize_4bit

    # the 16-bit weight is loaded first, then quantised
    options = {name: getattr(parameter, name) for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage")}
    packed, state = quantize_4bit(torch.empty(parameter.shape, dtype=dtype), **options)
    weight: Any = nn.Parameter(packed, requires_grad=False)
    weight.quant_state = state
    weight.compress_statistics, weight.quant_type = parameter.compress_statistics, parameter.quant_type
    return weight


def _packed_8bit(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    loaded = torch.empty(parameter.shape, dtype=dtype)  # lives until the codes of its fp16 copy exist
    values = torch.empty(loaded.shape, dtype=torch.float16)
    scales = torch.empty(values.shape[:1], dtype=torch.float32)
    codes = torch.empty(values.shape, dtype=torch.int8)
    weight = nn.Parameter(codes, requires_grad=False)
    weight.CB, weight.SCB, weight.has_fp16_weights = weight.data, scales, False  # type: ignore[attr-defined]
    return weight


def fake_dora_weights() -> AbstractContextManager[None]:
    """Temporarily give DoRA fake base weights."""
    # DoRA reads the dequantised base weights when it is attached and in each forward pass
    return dora_weights(_dequantised_weight, _copy_of_layer)


def _copy_of_layer(layer: Any) -> Any:
    if layer.weight.is_meta:
        return layer
    copied = copy.copy(layer)
    weight: Any = nn.Parameter(layer.weight.clone(), requires_grad=False)
    weight.quant_state = copy.deepcopy(layer.weight.quant_state)
    copied._parameters = {**layer._parameters, "weight": weight}
    return copied


def _dequantised_weight(layer: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    weight: Any = layer.weight
    if isinstance(layer, (Linear4bit, Linear8bitLt)) and weight.is_meta:
        shape = (layer.out_features, layer.in_features)
        return nn.Parameter(torch.empty(shape, dtype=torch.float32, device="meta"), requires_grad=False)
    if isinstance(layer, Linear4bit):
        return dequantize_4bit(weight.data, weight.quant_state)
    if isinstance(layer, Linear8bitLt):
        scales: Any = weight.SCB if weight.SCB is not None else layer.state.SCB
        return (weight.data * scales.view(-1, 1)) * (1.0 / 127.0)  # as int8_vectorwise_dequant
    return weight
