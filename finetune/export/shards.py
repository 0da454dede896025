"""Merge an adapter into a model folder tensor by tensor: only one tensor and its change are in memory, never the model.

The output has the source's files, names and dtypes; only adapted tensors differ. Files are written by hand, as the format of
safetensors is simple and its library writes whole files from memory: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch

from finetune.errors import CommandError
from finetune.files import read_safetensors_header
from finetune.model.new_tokens import TRAINED_ROWS
from finetune.model.weights import ADAPTER_WEIGHTS, INDEX, weight_files
from finetune.system import sync_file

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_COPY_BYTES = 2**24  # copied at once


class ShardMergeError(Exception):
    """The checkpoint stores an adapted weight in a form to which the adapter's change can't be added."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `begin` and `size` of its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    size: int


def stored_tensors(folder: Path) -> list[StoredTensor]:
    """The tensors of a model folder in the order of its files; files that its index doesn't name are left out."""
    return [stored for name in weight_files(folder) for stored in _tensors_in_file(folder / name)]


def _tensors_in_file(path: Path) -> list[StoredTensor]:
    with path.open("rb") as file:
        header, data_begin = read_safetensors_header(file)
    tensors = []
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            tensors.append(StoredTensor(name, entry["dtype"], tuple(entry["shape"]), path, data_begin + begin, end - begin))
    return sorted(tensors, key=lambda stored: stored.begin)


def with_adapter(base: Any, adapter: Path) -> Any:
    """A PeftModel of a base on the meta device, with its adapter in host memory, in PEFT's float32."""
    from peft import PeftModel, set_peft_model_state_dict
    from safetensors.torch import load_file

    model = PeftModel.from_pretrained(base, str(adapter), use_safetensors=True, low_cpu_mem_usage=True, torch_device="cpu")
    for path, module in model.named_modules():  # PEFT has moved the adapter to the base's device
        for name, value in module._parameters.items():
            if value is not None and value.is_meta and ("lora_" in f"{path}.{name}" or TRAINED_ROWS in f"{path}.{name}"):
                module._parameters[name] = torch.nn.Parameter(torch.full(value.shape, torch.nan), requires_grad=False)
    set_peft_model_state_dict(model, load_file(adapter / ADAPTER_WEIGHTS))
    return model


class AdapterChanges:
    """The changes of an adapter to the tensors of a checkpoint.

    `model`: from `with_adapter`. Its base was loaded from that checkpoint, so that transformers can revert how it renamed and
    converted the tensors. Raises ShardMergeError.
    """

    def __init__(self, model: Any, tensors: list[StoredTensor]) -> None:
        self._base = model.get_base_model()
        self._layers = dict(_adapted_layers(model))
        self._tables = dict(_grown_tables(model))
        self._table_of: dict[str, str] = {}
        tensors_by_name = {stored.name: stored for stored in tensors}
        self._tied = dict(getattr(self._base, "all_tied_weights_keys", None) or {})
        self._parameter_of: dict[str, str] = {}
        self._split_parameters: set[str] = set()
        for parameter in self._layers:
            if parameter in {*self._tied, *self._tied.values()}:
                raise ShardMergeError(f"{parameter} is tied to another weight")
            shapes = self._checkpoint_shapes(parameter)
            if len(shapes) > 1:
                self._split_parameters.add(parameter)
            for name, shape in shapes.items():
                stored = tensors_by_name.get(name)
                if stored is None or stored.shape != shape or stored.dtype not in _DTYPES or name in self._parameter_of:
                    raise ShardMergeError(f"{parameter} is not stored as {name} {shape}")
                self._parameter_of[name] = parameter
        for parameter in self._tables:
            self._find_table(parameter, tensors_by_name)
        self._cached_change = lru_cache(maxsize=4)(self._change)  # experts' weights alternate in a file

    def __contains__(self, name: str) -> bool:
        return name in self._parameter_of or name in self._table_of

    def shape(self, stored: StoredTensor) -> tuple[int, ...]:
        """The shape of the merged tensor: a table of embeddings may have more rows."""
        if stored.name not in self._table_of:
            return stored.shape
        _, end = self._tables[self._table_of[stored.name]].first_and_end
        return max(stored.shape[0], end), *stored.shape[1:]

    def _find_table(self, parameter: str, stored: dict[str, StoredTensor]) -> None:
        """Find the checkpoint's tensors of a table with trained rows, and of the weight that is tied to it."""
        for name in (parameter, *(target for target, source in self._tied.items() if source == parameter)):
            for stored_name in _as_stored(self._base, {name: torch.empty(1, 1, device="meta")}):
                if stored_name in stored and stored[stored_name].dtype in _DTYPES:
                    self._table_of[stored_name] = parameter
        if parameter not in self._table_of.values():
            raise ShardMergeError(f"{parameter} is not stored under its name")

    def _with_rows(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        trained_rows = self._tables[self._table_of[name]]
        first, end = trained_rows.first_and_end
        grown = weight.new_zeros(max(len(weight), end), weight.shape[1])
        grown[: len(weight)] = weight
        grown[first:end] = trained_rows.values.to(weight.dtype)
        return _finite(grown, name)

    def merged(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The merged tensor, as PEFT would compute it from this weight. Raises CommandError when it is not finite."""
        if name in self._table_of:
            return self._with_rows(name, weight)
        parameter = self._parameter_of[name]
        layer = self._layers[parameter]
        if getattr(layer, "lora_variant", None):  # DoRA: not a sum, and it is stored as it is
            layer.get_base_layer().weight = torch.nn.Parameter(weight, requires_grad=False)
            layer.merge(safe_merge=True)
            merged_weight = layer.get_base_layer().weight.data
            layer.get_base_layer().weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)
        else:
            change = self._cached_change if parameter in self._split_parameters else self._change
            merged_weight = weight.add_(change(parameter, weight.dtype)[name])
        return _finite(merged_weight, name)

    def _checkpoint_shapes(self, parameter: str) -> dict[str, tuple[int, ...]]:
        layer = self._layers[parameter]
        weight = layer.get_param() if getattr(layer, "parameter_name", None) else layer.get_base_layer().weight
        shape = torch.Size(weight.shape)
        try:
            stored = _as_stored(self._base, {parameter: torch.empty(shape, device="meta")})
        except (KeyError, ValueError, RuntimeError, IndexError, TypeError) as error:
            raise ShardMergeError(f"{parameter}: {error}") from error
        if getattr(layer, "lora_variant", None) and (len(stored) != 1 or not self._is_stored_unchanged(parameter, shape)):
            raise ShardMergeError(f"{parameter} has DoRA and is stored in another form")
        return {name: tuple(values.shape) for name, values in stored.items()}

    def _is_stored_unchanged(self, parameter: str, shape: torch.Size) -> bool:
        """Whether the checkpoint has this parameter's values in the same shape and order."""
        positions = torch.arange(shape.numel()).reshape(shape)
        [stored] = _as_stored(self._base, {parameter: positions.clone()}).values()
        return stored.shape == shape and torch.equal(stored, positions)

    def _change(self, parameter: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The tensors that the adapter adds to a parameter, by their names in the checkpoint."""
        layer = self._layers[parameter]
        return _as_stored(self._base, {parameter: layer.get_delta_weight(layer.active_adapters[0]).to(dtype)})


@dataclass(frozen=True)
class _TrainedRows:
    """Rows of a table from the first to the end, and their values."""

    first_and_end: tuple[int, int]
    values: torch.Tensor


def _grown_tables(model: Any) -> Iterator[tuple[str, _TrainedRows]]:
    """Name in the model without adapters, and the trained rows, of each table with new tokens."""
    from peft.tuners.trainable_tokens import TrainableTokensLayer

    for path, module in model.get_base_model().named_modules():
        if isinstance(module, TrainableTokensLayer) and module.tied_adapter is None:
            [(adapter, values)] = module.trainable_tokens_delta.items()
            indices = module.token_indices[adapter]
            yield f"{path.removesuffix('.token_adapter')}.weight", _TrainedRows((indices[0], indices[-1] + 1), values.detach())


def _finite(weight: torch.Tensor, name: str) -> torch.Tensor:
    """The weight. Raises CommandError when it has values that are not finite."""
    if not torch.isfinite(weight).all():
        raise CommandError(f"{name} would have values that are not finite after merging", "Its training diverged: train again.")
    return weight


def _as_stored(base: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(base, values))


def _adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Name in the model without adapters, and the layer with its adapter, of each adapted weight."""
    from peft.tuners.lora.layer import LoraLayer

    modules: dict[str, Any] = dict(model.get_base_model().named_modules())
    for path, module in modules.items():
        if isinstance(module, LoraLayer):
            if name := getattr(module, "parameter_name", None):  # PEFT computes the change on the parameter's device
                base: Any = module.get_base_layer()
                parameter = getattr(base, name)
                placeholder = torch.empty(1, dtype=parameter.dtype).expand(parameter.shape)
                base._parameters[name] = torch.nn.Parameter(placeholder, requires_grad=False)
            module_name = ".".join(part for part in path.split(".") if part != "base_layer")
            yield f"{module_name}.{name or 'weight'}", module


def write_shards(
    tensors: list[StoredTensor], changes: AdapterChanges, target: Path, *, max_bytes: int | None,
    progress: Callable[[str], None],
) -> None:  # fmt: skip
    """Write the merged tensors to the folder `target`: as the source's files, or as files of at most `max_bytes`.

    A tensor that is larger has a file of its own. Raises OSError when the disk is full.
    """
    files = _files(tensors, max_bytes)
    for number, (name, file_tensors) in enumerate(files.items(), 1):
        progress(f"writing file {number} of {len(files)}")
        _write(target / name, file_tensors, changes)
        sync_file(target / name)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(_merged_size(stored, changes) for stored in tensors)},
            "weight_map": {stored.name: name for name, file_tensors in files.items() for stored in file_tensors},
        }
        (target / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _files(tensors: list[StoredTensor], max_bytes: int | None) -> dict[str, list[StoredTensor]]:
    if max_bytes is None:
        return {name: list(group) for name, group in itertools.groupby(tensors, key=lambda stored: stored.path.name)}
    shards: list[list[StoredTensor]] = [[]]
    for stored in tensors:
        if shards[-1] and sum(tensor.size for tensor in shards[-1]) + stored.size > max_bytes:
            shards.append([])
        shards[-1].append(stored)
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, 1)}


def _write(path: Path, tensors: list[StoredTensor], changes: AdapterChanges) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for stored in tensors:
        size = _merged_size(stored, changes)
        header[stored.name] = {"dtype": stored.dtype, "shape": changes.shape(stored), "data_offsets": [end, end + size]}
        end += size
    encoded_header = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded_header += b" " * (-len(encoded_header) % 8)
    with path.open("wb") as output:
        output.write(len(encoded_header).to_bytes(8, "little") + encoded_header)
        for stored in tensors:
            with stored.path.open("rb") as source:
                source.seek(stored.begin)
                if stored.name in changes:
                    _write_changed(stored, source, output, changes)
                else:
                    _copy(source, output, stored.size)


def _merged_size(stored: StoredTensor, changes: AdapterChanges) -> int:
    return stored.size if stored.name not in changes else math.prod(changes.shape(stored)) * _DTYPES[stored.dtype].itemsize


def _write_changed(stored: StoredTensor, source: BinaryIO, output: BinaryIO, changes: AdapterChanges) -> None:
    data = bytearray(stored.size)
    if source.readinto(data) != stored.size:  # type: ignore[attr-defined]
        raise CommandError(f"{stored.path} is truncated", "Download the weights again.")
    weight = torch.frombuffer(data, dtype=_DTYPES[stored.dtype]).reshape(stored.shape)
    merged = changes.merged(stored.name, weight).contiguous()
    output.write(merged.view(-1).view(torch.uint8).numpy().data)


def _copy(source: BinaryIO, output: BinaryIO, size: int) -> None:
    while size:
        data = source.read(min(size, _COPY_BYTES))
        if not data:
            raise CommandError(f"{source.name} is truncated", "Download the weights again.")
        output.write(data)
        size -= len(data)
