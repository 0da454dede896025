"""Merge the adapter into 16-bit weights, as a standard model folder: tensor by tensor, or in memory."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from huggingface_hub import snapshot_download, split_state_dict_into_shards_factory
from peft import PeftModel, set_peft_model_state_dict
from peft.tuners.lora.layer import LoraLayer
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion

from finetune.compat.transformers import quiet_libraries
from finetune.data.report import first_line
from finetune.data.tokenizer import read_tokenizer
from finetune.errors import CommandError, DiskFull, ModelError, OutOfMemory, is_disk_full
from finetune.files import existing_parent, free_disk_bytes, read_json, read_safetensors_header, write_safetensors
from finetune.layers.host_memory import bytes_of
from finetune.model.adapters import grow_vocabulary
from finetune.model.build import build_base, build_on_meta, model_dtype
from finetune.model.configuration import resolve_model_path
from finetune.model.language_model import is_multimodal
from finetune.model.transformers_config import load_config
from finetune.model.weights import ADAPTER_WEIGHTS, INDEX, weight_files
from finetune.planner.plan import read_plan
from finetune.run.directory import RunDirectory
from finetune.run.seal import require_own_adapter
from finetune.settings import resolved
from finetune.settings.base_formats import BITS_16, switches
from finetune.system import rename, sync_file
from finetune.units import Progress, format_bytes

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


_MARGIN_BYTES = 2**30  # for python, torch and the tensor being written
_FILE_BYTES = 5 * 10**9  # as transformers and the hub split models
#: Weights in other formats. They are not copied, as they have the values before merging.
OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite"}
#: End of the names under which FP8 and mxfp4 checkpoints store the parts of a weight.
_QUANTISED_PART = re.compile("_(scale_inv|scales|blocks)$")


def merge(
    run: RunDirectory, target: Path | None = None, *, max_shard_bytes: int | None = None, progress: Progress = lambda _: None
) -> Path:
    """Write base + adapter to `target` (default RUN/merged) atomically. Raise CommandError, OutOfMemory or DiskFull."""
    target = target or run.path / "merged"
    require_own_adapter(run, run.adapter)
    # merging into 4-bit weights would round the adapter away
    settings = resolved(read_plan(run.plan).settings, **switches(BITS_16))
    with atomic_folder(target) as temporary:
        write_merged(settings, run.adapter, temporary, max_shard_bytes, progress)
    return target


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a hidden path, not created yet, and rename it to `target` at the end. Raise CommandError or DiskFull."""
    if target.exists():
        raise CommandError(f"{target} exists already", "Delete or rename it, or give another --output.")
    temporary = target.with_name(f".{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield temporary
        rename(temporary, target)
    except Exception as error:
        if not isinstance(error, OSError) and not is_disk_full(error):
            raise
        fix = "Free some space and try again; no partial files are left."
        raise DiskFull(f"{target} could not be written: {error}", fix) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _merged_when_read(settings: Any, config: Any, adapter: Path, stored: Any, progress: Progress) -> list[Any] | None:
    # Tensor by tensor, so that the whole model need not fit into memory. None where that is impossible: a base that is stored
    # quantised or under other names, and a vocabulary that grows.
    if getattr(config, "quantization_config", None) or settings.trained_embedding_rows:
        return None
    _check_memory(4 * max(tensor.size_bytes for tensor in stored), "four times the largest tensor")
    progress("reading the adapter")
    base = build_base(settings, config, device="meta", weights=True)
    try:
        return merged_tensors(with_adapter(base, adapter), stored)
    except StoredOtherwiseError:
        return None


def write_merged(settings: Any, adapter: Path, folder: Path, max_shard_bytes: int | None, progress: Progress) -> None:
    """Write a standard model folder. Raise OutOfMemory or DiskFull before anything is written."""
    quiet_libraries()
    config, source = load_config(settings), model_folder(settings)
    stored = stored_tensors(source)
    tensors = _merged_when_read(settings, config, adapter, stored, progress)
    is_streamed = tensors is not None
    if tensors is None:
        tensors = _merged_in_memory(settings, config, adapter, folder, stored, progress)
        max_shard_bytes = max_shard_bytes or _FILE_BYTES  # the base's files hold other tensors
    require_disk(sum(tensor.size_bytes for tensor in tensors), folder)
    folder.mkdir(parents=True)
    progress("writing")
    write_tensors(tensors, folder, max_bytes=max_shard_bytes, progress=progress)
    for path in sorted(source.iterdir()):  # last: a model without its config.json does not load
        if path.is_file() and path.suffix not in (*OTHER_WEIGHTS, ".safetensors") and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    if not is_streamed:
        _update_config(folder / "config.json", settings)
    if settings.trained_embedding_rows or not is_multimodal(config) or settings.chat_template is not None:
        read_tokenizer(adapter, settings).save_pretrained(str(folder))  # else the base's files are copied


def _update_config(path: Path, settings: Any) -> None:
    values = read_json(path, dict)
    for name in ("quantization_config", "torch_dtype"):
        values.pop(name, None)
    values["dtype"] = settings.dtype
    if settings.trained_embedding_rows:
        for config in (values, values.get("text_config")):
            if isinstance(config, dict) and "vocab_size" in config:
                config["vocab_size"] = max(config["vocab_size"], settings.trained_embedding_rows[1])
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _merged_in_memory(
    settings: Any, config: Any, adapter: Path, folder: Path, stored: list[Tensor], progress: Progress
) -> list[Tensor]:
    is_quantised = bool(getattr(config, "quantization_config", None))  # loading removes it
    model = build_on_meta(config, None, dtype=model_dtype(settings), attention=None)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    _check_memory(weight_bytes, "the whole model, which can't be merged tensor by tensor")
    require_disk(weight_bytes, folder)  # before minutes of loading
    progress("loading the base model in 16 bit")
    base = build_base(settings, config, device="cpu", weights=True)
    grow_vocabulary(base, settings, None)
    progress("merging")
    merged: Any = PeftModel.from_pretrained(base, str(adapter), use_safetensors=True).merge_and_unload(safe_merge=True)
    tied = getattr(merged, "all_tied_weights_keys", {})
    values = {name: tensor for name, tensor in merged.state_dict().items() if name not in tied}
    # the conversions of a loaded quantised model include dequantising; reverting that would give FP8 values without scales
    values = revert_weight_conversion(model if is_quantised else merged, values)
    file = "model.safetensors"  # the only file, unless files are split by size
    tensors = [
        Tensor(name, _DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes, file, partial(bytes_of, tensor.detach()))
        for name, tensor in values.items()
    ]
    if not is_multimodal(config):
        return tensors
    # only the language model was loaded: add the other stored tensors, except the scales of the merged ones
    merged_names = {tensor.name for tensor in tensors}
    others = [tensor for tensor in stored if _QUANTISED_PART.sub("", tensor.name) not in merged_names]
    return tensors + [replace(tensor, file=file) for tensor in others]


def model_folder(settings: Any) -> Path:
    """Return the folder of a model's files, downloaded if needed. Raise ModelError."""
    path_or_id = resolve_model_path(settings)
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    ignored = [f"*{suffix}" for suffix in OTHER_WEIGHTS]
    try:
        return Path(snapshot_download(path_or_id, revision=settings.model_revision, ignore_patterns=ignored))
    except OSError as error:  # the base class of the hub's errors, too
        if is_disk_full(error):
            raise
        fix = "Its weights must be on this disk or reachable on the hub (gated models: `hf auth login`)."
        raise ModelError(f"model_name_or_path {path_or_id}: {first_line(error)}", fix) from None


def _check_memory(needed_bytes: int, purpose: str) -> None:
    free_bytes = psutil.virtual_memory().available
    if needed_bytes + _MARGIN_BYTES > free_bytes:
        raise OutOfMemory(
            f"merging needs {format_bytes(needed_bytes)} of host memory ({purpose}), but {format_bytes(free_bytes)} is free",
            "Close other programs, or use the adapter without merging: servers can load base + adapter.",
        )


def require_disk(needed_bytes: int, target: Path, subject: str = "the merged model") -> None:
    """Raise DiskFull if `target`'s file system has fewer free bytes."""
    existing, free_bytes = existing_parent(target), free_disk_bytes(target)
    if needed_bytes > free_bytes:
        raise DiskFull(
            f"{subject} needs {format_bytes(needed_bytes)}, but {existing} has {format_bytes(free_bytes)} free",
            "Give another --output.",
        )
