"""Merge an adapter into a model folder tensor by tensor: what is in memory is one tensor and its change, never the model.

The output has the source's files, names and dtypes; only adapted tensors differ. Files are written by hand, as the format of
safetensors is simple and its library writes whole files from memory: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch

from finetune.errors import CommandError
from finetune.system import sync_file

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_COPIED = 2**24  # bytes at once
INDEX = "model.safetensors.index.json"


class NotByShards(Exception):
    """The checkpoint stores an adapted weight in a form to which its change can't be added."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: where its bytes are."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    size: int


def stored_tensors(folder: Path) -> list[Stored]:
    """The tensors of a model folder in the order of its files; files that its index doesn't name are left out."""
    index = folder / INDEX
    if index.is_file():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        paths = [folder / name for name in names]
    else:
        paths = sorted(folder.glob("*.safetensors"))
    return [stored for path in paths for stored in _in_file(path)]


def _in_file(path: Path) -> list[Stored]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    found = []
    for name, values in header.items():
        if name != "__metadata__":
            begin, end = values["data_offsets"]
            found.append(Stored(name, values["dtype"], tuple(values["shape"]), path, 8 + length + begin, end - begin))
    return sorted(found, key=lambda stored: stored.begin)


def with_adapter(base: Any, adapter: Path) -> Any:
    """A PeftModel of a base on the meta device, whose adapter is in host memory, in float32 as PEFT has it."""
    from peft import PeftModel, set_peft_model_state_dict
    from safetensors.torch import load_file

    model = PeftModel.from_pretrained(base, str(adapter), use_safetensors=True, low_cpu_mem_usage=True, torch_device="cpu")
    for path, module in model.named_modules():  # PEFT has moved them to the base's device
        for name, value in module._parameters.items():
            if value is not None and value.is_meta and "lora_" in f"{path}.{name}":
                module._parameters[name] = torch.nn.Parameter(torch.full(value.shape, torch.nan), requires_grad=False)
    set_peft_model_state_dict(model, load_file(adapter / "adapter_model.safetensors"))
    return model


class Changes:
    """What an adapter changes in the tensors of a checkpoint.

    `model`: from `with_adapter`. Its base was loaded from that checkpoint, so that transformers knows how it renamed and
    converted the tensors. Raises NotByShards.
    """

    def __init__(self, model: Any, tensors: list[Stored]) -> None:
        self._base = model.get_base_model()
        self._layers = dict(_adapted(model))
        known = {stored.name: stored for stored in tensors}
        tied = dict(getattr(self._base, "all_tied_weights_keys", None) or {})
        self._parameter_of: dict[str, str] = {}
        self._in_parts: set[str] = set()
        for parameter in self._layers:
            if parameter in {*tied, *tied.values()}:
                raise NotByShards(f"{parameter} is tied to another weight")
            parts = self._stored_as(parameter)
            if len(parts) > 1:
                self._in_parts.add(parameter)
            for name, shape in parts.items():
                stored = known.get(name)
                if stored is None or stored.shape != shape or stored.dtype not in _DTYPES or name in self._parameter_of:
                    raise NotByShards(f"{parameter} is not stored as {name} {shape}")
                self._parameter_of[name] = parameter
        self._kept = lru_cache(maxsize=4)(self._change)  # experts' weights alternate in a file

    def __contains__(self, name: str) -> bool:
        return name in self._parameter_of

    def __len__(self) -> int:
        return len(self._parameter_of)

    def applied(self, name: str, weight: torch.Tensor) -> torch.Tensor:
        """The merged tensor, as PEFT would compute it from this weight. Raises CommandError when it is not finite."""
        parameter = self._parameter_of[name]
        layer = self._layers[parameter]
        if getattr(layer, "lora_variant", None):  # DoRA: not a sum, and it is stored as it is
            layer.get_base_layer().weight = torch.nn.Parameter(weight, requires_grad=False)
            layer.merge(safe_merge=True)
            merged = layer.get_base_layer().weight.data
            layer.get_base_layer().weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)
        else:
            change = self._kept if parameter in self._in_parts else self._change
            merged = weight.add_(change(parameter, weight.dtype)[name])
        if not torch.isfinite(merged).all():
            raise CommandError(
                f"{name} would have values that are not finite after merging", "Its training diverged: train again."
            )
        return merged

    def _stored_as(self, parameter: str) -> dict[str, tuple[int, ...]]:
        """Names and shapes in the checkpoint of a parameter of the model."""
        layer = self._layers[parameter]
        shape = _shape(layer)
        try:
            made = _reverted(self._base, {parameter: torch.empty(shape, device="meta")})
        except (KeyError, ValueError, RuntimeError, IndexError, TypeError) as error:
            raise NotByShards(f"{parameter}: {error}") from error
        if getattr(layer, "lora_variant", None) and (len(made) != 1 or not self._is_stored_as_it_is(parameter, shape)):
            raise NotByShards(f"{parameter} has DoRA and is stored in another form")
        return {name: tuple(values.shape) for name, values in made.items()}

    def _is_stored_as_it_is(self, parameter: str, shape: torch.Size) -> bool:
        """Whether the conversion of this parameter moves none of its values."""
        numbers = torch.arange(shape.numel()).reshape(shape)
        [made] = _reverted(self._base, {parameter: numbers.clone()}).values()
        return made.shape == shape and torch.equal(made, numbers)

    def _change(self, parameter: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """What the adapter adds to a parameter, in the checkpoint's form."""
        layer = self._layers[parameter]
        return _reverted(self._base, {parameter: layer.get_delta_weight(layer.active_adapters[0]).to(dtype)})


def _reverted(base: Any, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return dict(revert_weight_conversion(base, values))


def _shape(layer: Any) -> torch.Size:
    """Shape of the weight that a layer with an adapter changes."""
    name = getattr(layer, "parameter_name", None)
    weight = layer.get_param() if name else layer.get_base_layer().weight
    return torch.Size(weight.shape)


def _adapted(model: Any) -> Iterator[tuple[str, Any]]:
    """Name in the model without adapters, and layer with an adapter, of each adapted weight."""
    from peft.tuners.lora.layer import LoraLayer

    modules: dict[str, Any] = dict(model.get_base_model().named_modules())
    for path, module in modules.items():
        if isinstance(module, LoraLayer):
            if name := getattr(module, "parameter_name", None):  # PEFT puts the change where the parameter is
                base: Any = module.get_base_layer()
                parameter = getattr(base, name)
                stand_in = torch.empty(1, dtype=parameter.dtype).expand(parameter.shape)
                base._parameters[name] = torch.nn.Parameter(stand_in, requires_grad=False)
            own = ".".join(part for part in path.split(".") if part != "base_layer")
            yield f"{own}.{name or 'weight'}", module


def write_shards(
    tensors: list[Stored], changes: Changes, target: Path, *, most_bytes: int | None, progress: Callable[[str], None]
) -> None:
    """Write the merged tensors to the folder `target`: as the source's files, or as files of at most `most_bytes`.

    A tensor that is larger has a file of its own. Raises OSError when the disk is full.
    """
    files = _files(tensors, most_bytes)
    for number, (name, inside) in enumerate(files.items(), 1):
        progress(f"writing file {number} of {len(files)}")
        _write(target / name, inside, changes)
        sync_file(target / name)
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(stored.size for stored in tensors)},
            "weight_map": {stored.name: name for name, inside in files.items() for stored in inside},
        }
        (target / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _files(tensors: list[Stored], most_bytes: int | None) -> dict[str, list[Stored]]:
    if most_bytes is None:
        files: dict[str, list[Stored]] = {}
        for stored in tensors:
            files.setdefault(stored.path.name, []).append(stored)
        return files
    parts: list[list[Stored]] = [[]]
    for stored in tensors:
        if parts[-1] and sum(each.size for each in parts[-1]) + stored.size > most_bytes:
            parts.append([])
        parts[-1].append(stored)
    if len(parts) == 1:
        return {"model.safetensors": parts[0]}
    return {f"model-{number:05}-of-{len(parts):05}.safetensors": part for number, part in enumerate(parts, 1)}


def _write(path: Path, tensors: list[Stored], changes: Changes) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for stored in tensors:
        header[stored.name] = {"dtype": stored.dtype, "shape": stored.shape, "data_offsets": [end, end + stored.size]}
        end += stored.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as writing:
        writing.write(len(text).to_bytes(8, "little") + text)
        for stored in tensors:
            with stored.path.open("rb") as reading:
                reading.seek(stored.begin)
                if stored.name in changes:
                    _write_changed(stored, reading, writing, changes)
                else:
                    _copy(reading, writing, stored.size)


def _write_changed(stored: Stored, reading: BinaryIO, writing: BinaryIO, changes: Changes) -> None:
    data = bytearray(stored.size)
    if reading.readinto(data) != stored.size:  # type: ignore[attr-defined]
        raise CommandError(f"{stored.path} is truncated", "Download the weights again.")
    weight = torch.frombuffer(data, dtype=_DTYPES[stored.dtype]).reshape(stored.shape)
    merged = changes.applied(stored.name, weight).contiguous()
    writing.write(merged.view(-1).view(torch.uint8).numpy().data)


def _copy(reading: BinaryIO, writing: BinaryIO, size: int) -> None:
    while size:
        data = reading.read(min(size, _COPIED))
        if not data:
            raise CommandError(f"{reading.name} is truncated", "Download the weights again.")
        writing.write(data)
        size -= len(data)
