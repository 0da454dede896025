"""Merge an adapter into a checkpoint tensor by tensor; the model is never in memory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import split_state_dict_into_shards_factory
from peft import PeftModel, set_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion

from finetune.errors import CommandError
from finetune.files import read_safetensors_header, write_safetensors
from finetune.layers.host_memory import bytes_of
from finetune.model.weights import ADAPTER_WEIGHTS, INDEX, weight_files
from finetune.system import sync_file
from finetune.units import Progress

#: Dtypes of tensors that can change, by their names in a file.
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()} | {
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


class StoredOtherwiseError(Exception):
    """A weight is stored in a form that can't be merged."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint to write."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    file: str  # name of the file to write it to
    read: Callable[[], Any]  # returns its bytes


def stored_tensors(folder: Path) -> list[Tensor]:
    """Return the tensors of a model folder in file order."""
    tensors = []
    for file in weight_files(folder):  # files that the index doesn't name are left out
        with (folder / file).open("rb") as opened:
            header, data_begin = read_safetensors_header(opened)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
            begin, end = entry["data_offsets"]
            read = partial(_read, folder / file, data_begin + begin, end - begin)
            tensors.append(Tensor(name, entry["dtype"], tuple(entry["shape"]), end - begin, file, read))
    return tensors


def _read(path: Path, begin: int, size_bytes: int) -> np.ndarray:
    data = np.fromfile(path, np.uint8, size_bytes, offset=begin)
    if len(data) < size_bytes:
        raise CommandError(f"{path} is truncated", "Download the weights again.")
    return data


def tensor_in_memory(name: str, values: torch.Tensor) -> Tensor:
    """Return the entry that writes a tensor from memory."""
    shape, file = tuple(values.shape), "model.safetensors"  # the only file, unless files are split by size
    return Tensor(name, _DTYPE_NAMES[values.dtype], shape, values.nbytes, file, lambda: bytes_of(values.detach()))


def with_adapter(base: Any, adapter: Path) -> Any:
    """Load a PeftModel on a meta base, its adapter in host memory."""
    model = PeftModel.from_pretrained(base, str(adapter), use_safetensors=True, low_cpu_mem_usage=True, torch_device="cpu")
    for path, module in model.named_modules():  # PEFT has moved the adapter to meta; NaN reveals a tensor missing in its file
        for name, value in module._parameters.items():
            if value is not None and value.is_meta and "lora_" in f"{path}.{name}":
                module._parameters[name] = torch.nn.Parameter(torch.full(value.shape, torch.nan), requires_grad=False)
    set_peft_model_state_dict(model, load_file(adapter / ADAPTER_WEIGHTS))
    return model


def merged_tensors(model: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Return a checkpoint's tensors, merged when they are read. Raise StoredOtherwiseError."""
    # the base was loaded from this checkpoint, so transformers can revert how it renamed and converted tensors
    base = model.get_base_model()
    layers, merged = dict(_adapted_layers(base)), {tensor.name: tensor for tensor in tensors}
    tied = {name for names in (getattr(base, "all_tied_weights_keys", None) or {}).items() for name in names}

    def stored_delta(parameter: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        layer = layers[parameter]
        return revert_weight_conversion(base, {parameter: layer.get_delta_weight(layer.active_adapters[0]).to(dtype)})

    cached_delta = lru_cache(maxsize=4)(stored_delta)  # a file alternates between the weights of experts
    for parameter, layer in layers.items():
        if parameter in tied:
            raise StoredOtherwiseError(f"{parameter} is tied to another weight")
        if getattr(layer, "lora_variant", None):
            raise StoredOtherwiseError(f"{parameter} has DoRA, which is not a sum of weight and change")
        shapes = _stored_shapes(base, parameter, layer)
        for name, shape in shapes.items():
            tensor = merged.get(name)
            if tensor is None or tensor.shape != shape or tensor.dtype not in _DTYPES:
                raise StoredOtherwiseError(f"{parameter} is not stored as {name} {shape}")
            delta = partial(cached_delta if len(shapes) > 1 else stored_delta, parameter)
            merged[name] = replace(tensor, read=partial(_read_merged, tensor, delta))
    return list(merged.values())


def _read_merged(tensor: Tensor, delta: Callable[[torch.dtype], dict[str, torch.Tensor]]) -> Any:
    weight = torch.frombuffer(tensor.read(), dtype=_DTYPES[tensor.dtype]).reshape(tensor.shape)
    weight.add_(delta(weight.dtype)[tensor.name])
    if not torch.isfinite(weight).all():
        problem = f"{tensor.name} would have values that are not finite after merging"
        raise CommandError(problem, "Its training diverged: train again.")
    return bytes_of(weight)


def _adapted_layers(base: Any) -> Iterator[tuple[str, Any]]:
    for path, module in base.named_modules():
        if isinstance(module, LoraLayer):
            name = getattr(module, "parameter_name", None)
            if name:  # PEFT computes the delta on the parameter's device: replace meta by one element of host memory
                base_layer: Any = module.get_base_layer()
                parameter = getattr(base_layer, name)
                placeholder = torch.empty(1, dtype=parameter.dtype).expand(parameter.shape)
                base_layer._parameters[name] = torch.nn.Parameter(placeholder, requires_grad=False)
            module_name = ".".join(part for part in path.split(".") if part != "base_layer")
            yield f"{module_name}.{name or 'weight'}", module


def _stored_shapes(base: Any, parameter: str, layer: Any) -> dict[str, tuple[int, ...]]:
    weight = layer.get_param() if getattr(layer, "parameter_name", None) else layer.get_base_layer().weight
    shape = torch.Size(weight.shape)
    try:
        stored = revert_weight_conversion(base, {parameter: torch.empty(shape, device="meta")})
    except (KeyError, ValueError, RuntimeError, IndexError, TypeError) as error:
        raise StoredOtherwiseError(f"{parameter}: {error}") from error
    return {name: tuple(values.shape) for name, values in stored.items()}


def write_tensors(
    tensors: list[Tensor], target: Path, *, max_bytes: int | None = None, progress: Progress = lambda _: None
) -> None:
    """Write tensors to their files, or to files of at most `max_bytes`."""
    by_name = {tensor.name: tensor for tensor in tensors}
    if max_bytes is None:
        groups = itertools.groupby(tensors, key=lambda tensor: tensor.file)
        files = {file: [tensor.name for tensor in group] for file, group in groups}
    else:
        split = split_state_dict_into_shards_factory(  # a larger tensor gets a separate file
            by_name, get_storage_size=lambda tensor: tensor.size_bytes, filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_bytes,
        )  # fmt: skip
        files = split.filename_to_tensors
    for number, (file, names) in enumerate(files.items(), 1):
        progress(f"writing file {number} of {len(files)}")
        entries = {name: (by_name[name].dtype, by_name[name].shape, by_name[name].size_bytes) for name in names}
        write_safetensors(target / file, entries, lambda name: by_name[name].read())
        sync_file(target / file)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(tensor.size_bytes for tensor in tensors)},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        (target / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")
