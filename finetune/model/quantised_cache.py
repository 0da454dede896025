"""Base models loaded from folders of quantised weights: whole, or each FSDP2 rank's rows."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Params4bit
from filelock import FileLock
from huggingface_hub import snapshot_download
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from finetune.compat.accelerate import shard_with
from finetune.compat.transformers import quantised_on, sequential_loading
from finetune.errors import DiskFull, FinetuneError
from finetune.files import free_disk_bytes, write_text
from finetune.layers.layer_offloading import offload_layers
from finetune.layers.quantised_files import SUFFIX, delete, folder, lock_of
from finetune.layers.quantised_store import (
    FORMAT,
    OUTSIDE,
    Damaged,
    LayoutMismatch,
    Parts,
    Store,
    needed_bytes,
    parts_of,
    write_part,
)
from finetune.manifest import MANIFEST, write_manifest
from finetune.model import build
from finetune.model.configuration import resolve_model_path
from finetune.model.quantisation import quantization_config
from finetune.model.weights import weights_fingerprint
from finetune.printable import Progress
from finetune.settings import Settings
from finetune.settings.base_formats import base_format_of
from finetune.system import rename, return_freed_memory, sync_folder
from finetune.units import format_bytes

Device = torch.device | str | int
#: The modules that use a parameter, and the parameter's name in each.
Uses = list[tuple[Any, str]]
_FREE_SPACE_HINT = "run `finetune cache clear`, or set FINETUNE_CACHE to a folder on another disk"
#: Libraries that decide the bytes of a quantised weight.
_LIBRARIES = ("bitsandbytes", "transformers", "torch")


def open_store(settings: Settings, config: PretrainedConfig, device: Device, log: Progress) -> Store:
    """Return the model's verified folder, written if missing or damaged. Raises DiskFull, LayoutMismatch, leaving no folder."""
    parts = parts_of(build.build_base(settings, config, device="cpu", weights=False))
    facts = facts_of(settings, config, torch.device(device).type)
    name = re.sub(r"[^\w.-]+", "-", Path(settings.model_name_or_path).name)[:60]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = folder() / f"{name}-{key}{SUFFIX}"
    with _disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(lock_of(path)).acquire()
    with lock:  # one process of a machine writes, others that need the same folder wait
        try:
            return _open(path, parts)
        except FileNotFoundError:
            pass
        except LayoutMismatch as error:
            log(f"{error}; rebuilding it")
            delete(path)
        began = time.perf_counter()
        required_bytes, free_bytes = needed_bytes(parts), free_disk_bytes(path.parent)
        if required_bytes > free_bytes:
            problem = f"{path} needs {format_bytes(required_bytes)}, but only {format_bytes(free_bytes)} are free"
            raise DiskFull(problem, f"Free some space: {_FREE_SPACE_HINT}.")
        with _disk_errors(path), _partial_folder(path) as partial_path:
            write_layer = _LayerWriter(partial_path, parts)
            # no process ever holds the whole model: each layer is written and freed when it is complete
            with quantised_on(torch.device(device)), sequential_loading(write_layer):
                base = build.build_base(settings, config, device="cpu", weights=True)
            for part in parts.keys() - write_layer.written:
                write_part(partial_path, part, {name: value_of(base, name) for name in parts[part]})
            write_manifest(partial_path, {"facts": facts})
            rename(partial_path, path)
            sync_folder(path.parent)
        where = "GPU" if torch.device(device).type == "cuda" else "CPU"
        seconds, size = time.perf_counter() - began, format_bytes(sum(file.stat().st_size for file in path.iterdir()))
        log(f"quantised the weights in {seconds:,.0f} s on the {where} and kept them for later starts: {path}, {size}")
        return _open(path, parts, is_verified=True)


@contextlib.contextmanager
def _partial_folder(path: Path) -> Iterator[Path]:
    partial_path = path.with_name(f"{path.name}.partial")
    delete(partial_path)  # left by a killed process
    partial_path.mkdir()
    try:
        yield partial_path
    finally:
        shutil.rmtree(partial_path, ignore_errors=True)


def _open(path: Path, parts: Parts, *, is_verified: bool = False) -> Store:
    store = Store(path)
    if {part: set(names) for part, names in store.parts.items()} != {part: set(values) for part, values in parts.items()}:
        raise LayoutMismatch(f"{path} was written by other library versions")
    verified_file, manifest = path.with_name(f"{path.name}.checked"), (path / MANIFEST).stat()
    # all processes of a launch on this machine have the same parent: the first verifies the folder for all
    launch = f"{os.getppid()} {manifest.st_ino} {manifest.st_size} {manifest.st_mtime_ns}"
    with contextlib.suppress(OSError):
        is_verified |= verified_file.read_text(encoding="utf-8") == launch
    if not is_verified:
        store.verify()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(OSError):
            write_text(verified_file, launch)
    return store


def facts_of(settings: Settings, config: PretrainedConfig, device_type: str) -> dict[str, Any]:
    """Return the facts that decide the bytes of a model's folder."""
    quantization = quantization_config(settings, config)
    return {
        "format": FORMAT, "model": settings.model_name_or_path, "weights": _fingerprint(settings),
        "quantisation": json.loads(quantization.to_json_string()) if quantization is not None else None,
        "dtype": settings.dtype, "quantised_on": device_type, "versions": {name: version(name) for name in _LIBRARIES},
    }  # fmt: skip


def _fingerprint(settings: Settings) -> str:
    if weights_fingerprint(settings) is None:
        patterns = ["*.safetensors", "*.json", "*.py"]
        # the fingerprint needs the files on this disk
        snapshot_download(resolve_model_path(settings), revision=settings.model_revision, allow_patterns=patterns)
    return str(weights_fingerprint(settings))


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DiskFull(f"{path} can't be written: {error.strerror or error}", f"Free some space: {_FREE_SPACE_HINT}.") from None
    # transformers would blame the checkpoint for both
    except (KeyError, AttributeError) as error:
        raise LayoutMismatch(f"{path} can't hold this model: {type(error).__name__}: {error}") from error


class _LayerWriter:
    """Writes each layer once all its parameters are loaded, and frees its memory."""

    def __init__(self, path: Path, parts: Parts) -> None:
        self._folder, self._parts, self.written = path, parts, set[str]()
        self._unloaded = {part: set(values) for part, values in parts.items() if part != OUTSIDE}
        self._part_of = {name: part for part, names in self._unloaded.items() for name in names}
        self._paths: dict[torch.nn.Module, str] = {}

    def __call__(self, model: torch.nn.Module, module: torch.nn.Module, name: str) -> None:
        self._paths = self._paths or {child: path for path, child in model.named_modules()}
        full_name = f"{self._paths[module]}.{name}"
        part = self._part_of.get(full_name)
        if part is None:
            return
        self._unloaded[part].discard(full_name)
        if not self._unloaded[part]:
            with _disk_errors(self._folder):
                write_part(self._folder, part, {name: value_of(model, name) for name in self._parts[part]})
            self.written.add(part)
            for name in self._parts[part]:
                _release(model, name)
        return_freed_memory()  # quantisation on a CPU takes 14 bytes for each element of a matrix


def _release(model: torch.nn.Module, name: str) -> None:
    path, _, attribute = name.rpartition(".")
    module: Any = model.get_submodule(path)
    parameter = module._parameters[attribute]
    # emptied, not removed: transformers checks later that the parameter was loaded
    parameter.data = parameter.data.new_empty(0)
    if hasattr(parameter, "quant_state"):
        parameter.quant_state = module.quant_state = None


def value_of(model: torch.nn.Module, name: str) -> Any:
    """Return the parameter, buffer or attribute `name`. Raises LayoutMismatch for an unloaded tensor."""
    path, _, attribute = name.rpartition(".")
    value = getattr(model.get_submodule(path), attribute, None)
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise LayoutMismatch(f"{name} was not loaded")
    return value


def load_base(
    settings: Settings, config: PretrainedConfig, device: Device, log: Progress, *, sharded: bool = False
) -> PreTrainedModel:
    """Return the base model on `device`, with offloaded layers as in the recipe.

    `sharded`: without weights; once accelerate has sharded the model by FSDP2, each rank reads its rows of the folder.
    """
    if sharded or (settings.layer_offloading is not False and base_format_of(settings).quantised_file):
        try:
            store = open_store(settings, config, device, log)
            return (_sharded_base if sharded else base_from)(store, settings, config, device)
        except (DiskFull, LayoutMismatch) as error:
            # the run is possible without the folder
            if sharded:
                log(f"{error}. Every process will load the whole model before sharding instead.")
            else:
                log(f"{error}. Every start will quantise the weights again instead.")
    return build.build_base(settings, config, device=device, weights=True, offloads=True)


def base_from(store: Store, settings: Settings, config: PretrainedConfig, device: Device) -> PreTrainedModel:
    """Return the base model on `device` from its folder."""
    base = build.build_base(settings, config, device=device, weights=False)
    offloading = None if settings.layer_offloading is False else offload_layers(base, settings, weights=True, store=store)
    for name, uses in _load_buffers(base, store, device).items():
        _set_parameter(uses, _parameter_like(uses, store.rows(name).to(device), store.quant_state(name, device)))
        if offloading is not None:
            path, _, attribute = name.rpartition(".")
            offloading.on_parameter_loaded(base.get_submodule(path), attribute)
    if offloading is not None:
        offloading.finish()
        base.layer_offloading = offloading  # type: ignore[assignment]
    base.quantised_store = store  # type: ignore[assignment]
    return _as_loaded(base, settings)


def require_unchanged_file(model: torch.nn.Module) -> None:
    """Raise FinetuneError when a model's quantised files have changed since it was loaded."""
    stores = (vars(module).get("quantised_store") for module in model.modules())
    for store in filter(None, stores):
        try:
            store.require_unchanged()
        except Damaged as error:
            raise FinetuneError(
                f"{error}, while the run read it; training since the last checkpoint is lost",
                "Resume the run, which rebuilds the file.",
            ) from None


def _as_loaded(base: PreTrainedModel, settings: Settings) -> PreTrainedModel:
    # what transformers does after loading a model
    path = resolve_model_path(settings)
    base.name_or_path = base.config.name_or_path = path
    if base.can_generate():
        with build.load_errors(path), contextlib.suppress(OSError):  # the file is optional
            base.generation_config = GenerationConfig.from_pretrained(path, revision=settings.model_revision or "main")
    return base.eval()


def _load_buffers(base: torch.nn.Module, store: Store, device: Device) -> dict[str, Uses]:
    """Read buffers and tensor attributes, and return where each stored parameter is used, outside the layers first."""
    uses: dict[int, Uses] = defaultdict(list)  # by the parameter's id: tied ones have several
    for module in base.modules():
        for name, parameter in module._parameters.items():
            uses[id(parameter)].append((module, name))
    frozen: dict[str, Uses] = {}
    for part in sorted(store.parts, key=lambda part: part != OUTSIDE):
        for name in store.parts[part]:
            path, _, attribute = name.rpartition(".")
            module = base.get_submodule(path)
            if (parameter := module._parameters.get(attribute)) is None:
                setattr(module, attribute, store.rows(name).to(device))
            else:
                frozen[name] = uses[id(parameter)]
    return frozen


def _parameter_like(uses: Uses, data: torch.Tensor, state: Any = None) -> torch.nn.Parameter:
    module, name = uses[0]
    old: Any = module._parameters[name]
    if not isinstance(old, Params4bit):
        return torch.nn.Parameter(data, requires_grad=False)
    parameter: Any = Params4bit(data, requires_grad=False, **{**vars(old), "quant_state": state, "bnb_quantized": True})
    if parameter.module is not None:
        parameter.module.quant_state = state
    return parameter


def _set_parameter(uses: Uses, parameter: torch.nn.Parameter) -> None:
    for module, name in uses:
        module._parameters[name] = parameter


def _sharded_base(store: Store, settings: Settings, config: PretrainedConfig, device: Device) -> PreTrainedModel:
    base = build.build_base(settings, config, device=device, weights=False)
    frozen = _load_buffers(base, store, device)
    for name, uses in frozen.items():
        stored = store.tensors[name]
        # until `_shard`, one element expanded to the shape: PEFT, TRL and accelerate read shape, dtype and device, so that
        # adapters are created as in a run that loads everything
        _set_parameter(uses, _parameter_like(uses, torch.empty(1, dtype=stored.dtype, device=device).expand(stored.shape)))
    weights_device = "cpu" if settings.launch.offload == "cpu" else device
    shard_with(partial(_shard, store, frozen, device, weights_device))
    return _as_loaded(base, settings)


def _shard(
    store: Store, frozen: dict[str, Uses], device: Device, weights_device: Device,
    shard_default: Callable[[Any, Any], Any], accelerator: Any, model: Any,
) -> Any:  # fmt: skip
    """Shard `model` with accelerate's function while its frozen parameters are on meta, then read this rank's rows."""
    for name, uses in frozen.items():
        stored = store.tensors[name]
        empty = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        _set_parameter(uses, torch.nn.Parameter(empty, requires_grad=False))
    prepared = shard_default(accelerator, model)
    for name, uses in frozen.items():
        owner, attribute = uses[0]
        rows = _rows_of_rank(store, name, owner._parameters[attribute], device, weights_device)
        _set_parameter(uses, torch.nn.Parameter(rows, requires_grad=False))
        if state := store.quant_state(name, device):
            # quantisation tables are not parameters: every rank has all of them
            owner.quant_state = state
    return prepared


def _rows_of_rank(store: Store, name: str, empty: Any, device: Device, weights_device: Device) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(empty, DTensor):
        return store.rows(name).to(device)
    mesh, rows = empty.device_mesh, store.tensors[name].shape[0]
    assert tuple(empty.placements) == (Shard(0),)
    # split as by torch.chunk: the last ranks may get fewer rows, or none
    rows_per_rank = -(-rows // mesh.size())
    first = min(rows, mesh.get_local_rank() * rows_per_rank)
    local_rows = store.rows(name, first, min(rows - first, rows_per_rank)).to(weights_device)
    return DTensor.from_local(local_rows, mesh, empty.placements, run_check=False, shape=empty.shape, stride=empty.stride())
