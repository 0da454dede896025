"""A base model loaded from a file of its quantised weights, which the first start writes layer by layer.

Neither holds the whole model in memory: the first start writes each decoder layer when it is complete, and frees it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from finetune.compat.transformers import quantised_on, sequential_loading
from finetune.errors import DiskFull, FinetuneError
from finetune.files import free_disk_bytes, write_text
from finetune.layers.layer_offloading import offload_layers
from finetune.layers.quantised_files import delete, folder, lock_of, remove_unfinished
from finetune.layers.quantised_store import (
    BOOKS,
    FORMAT,
    OUTSIDE,
    Damaged,
    LayoutMismatch,
    Part,
    Store,
    StoreWriter,
    file_bytes,
    parts_of,
)
from finetune.model import build
from finetune.model.configuration import resolve_model_path
from finetune.model.quantisation import quantization_config
from finetune.model.weights import weights_fingerprint
from finetune.settings import Settings
from finetune.settings.base_formats import base_format_of
from finetune.system import return_freed_memory, take_lock
from finetune.units import format_bytes

#: Called with messages for the user.
Log = Callable[[str], None]
Device = torch.device | str | int
_FREE_SPACE_HINT = "`finetune cache clear` deletes the files of other models; FINETUNE_CACHE names a folder on another disk"
#: Libraries that decide which bytes a weight becomes.
_LIBRARIES = ("bitsandbytes", "transformers", "torch")


def open_store(settings: Settings, config: PretrainedConfig, device: Device, log: Log) -> Store:
    """The model's file, with every part verified; written first where there is none, or where it is damaged.

    `device` quantises. One process of a machine writes, others that need the same file wait for it. Raises DiskFull when
    it can't be written and LayoutMismatch when it can't store this model; then no file is left.
    """
    shell = build.build_base(settings, config, device="cpu", weights=False)
    parts = parts_of(shell)
    facts = facts_of(settings, config, torch.device(device).type)
    name = re.sub(r"[^\w.-]+", "-", Path(settings.model_name_or_path).name)[:60]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = folder() / f"{name}-{key}.safetensors"
    with _locked(path):
        try:
            return _checked(path, parts)
        except FileNotFoundError:
            pass
        except LayoutMismatch as error:
            log(f"{error}; it is made again")
            delete(path)
        began = time.perf_counter()
        needed, free = file_bytes(parts), free_disk_bytes(path.parent)
        if needed > free:
            problem = f"{path} needs {format_bytes(needed)}, {format_bytes(free)} are free there"
            raise DiskFull(problem, f"Free some space: {_FREE_SPACE_HINT}.")
        with _disk_errors(path), StoreWriter(path, parts) as writer:
            with quantised_on(torch.device(device)), sequential_loading(_LayerWriter(writer)):
                base = build.build_base(settings, config, device="cpu", weights=True)
            for part in writer.missing:
                writer.write(part, {name: value_of(base, name) for name in part.parameters})
            writer.finish(facts)
        took = f"{time.perf_counter() - began:,.0f} s on the {'card' if torch.device(device).type == 'cuda' else 'processor'}"
        log(f"the weights were quantised in {took} and are kept for later starts: {path}, {format_bytes(file_bytes(parts))}")
        _mark_checked(path)
        return Store(path)


def _checked(path: Path, parts: tuple[Part, ...]) -> Store:
    store = Store(path)
    if store.parts != parts:
        raise LayoutMismatch(f"{path} is laid out for other versions of the libraries")
    with contextlib.suppress(OSError):
        if _checked_path(path).read_text(encoding="utf-8") == _file_identity(path):
            return store
    store.verify()
    _mark_checked(path)
    return store


def _file_identity(path: Path) -> str:
    """Identifies the file and the launch that checked it: all processes of a launch on this machine have the same parent."""
    about = path.stat()
    return f"{os.getppid()} {about.st_ino} {about.st_size} {about.st_mtime_ns}"


def _checked_path(path: Path) -> Path:
    return path.with_suffix(".checked")


def _mark_checked(path: Path) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(OSError):
            write_text(_checked_path(path), _file_identity(path))


def facts_of(settings: Settings, config: PretrainedConfig, device_type: str) -> dict[str, Any]:
    """What decides the bytes of a model's file: the content of its weights, quantisation, dtype, and what computes it."""
    quantization = quantization_config(settings, config)
    return {
        "format": FORMAT, "model": settings.model_name_or_path, "weights": _fingerprint(settings),
        "quantisation": json.loads(quantization.to_json_string()) if quantization is not None else None,
        "dtype": settings.dtype, "quantised_on": device_type, "versions": {name: version(name) for name in _LIBRARIES},
    }  # fmt: skip


def _fingerprint(settings: Settings) -> str:
    fingerprint = weights_fingerprint(settings)
    if fingerprint is None:
        from huggingface_hub import snapshot_download

        patterns = ["*.safetensors", "*.json", "*.py"]
        snapshot_download(resolve_model_path(settings), revision=settings.model_revision, allow_patterns=patterns)
        fingerprint = weights_fingerprint(settings)
    return str(fingerprint)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Lock the file for this process and remove what a killed one left. Raises DiskFull where the folder can't be used."""
    with _disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        while (lock := take_lock(lock_of(path), 0.5)) is None:
            time.sleep(0.05)
        remove_unfinished(path)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of the disk into DiskFull, and those of an unexpected model into LayoutMismatch: transformers would report
    them as errors of the checkpoint."""
    try:
        yield
    except OSError as error:
        raise DiskFull(f"{path} can't be written: {error.strerror or error}", f"Free some space: {_FREE_SPACE_HINT}.") from None
    except (KeyError, AttributeError) as error:
        raise LayoutMismatch(f"this model can't be kept in {path}: {type(error).__name__}: {error}") from error


class _LayerWriter:
    """Called for each loaded parameter: writes a layer once it is complete, and frees its memory."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        layers = [part for part in writer.parts if part.name != OUTSIDE]
        self._unloaded = {part.name: set(part.parameters) for part in layers}
        self._part_of = {name: part for part in layers for name in part.parameters}
        self._paths: dict[torch.nn.Module, str] = {}

    def __call__(self, model: torch.nn.Module, module: torch.nn.Module, name: str) -> None:
        self._paths = self._paths or {part: path for path, part in model.named_modules()}
        full = f"{self._paths[module]}.{name}"
        part = self._part_of.get(full)
        if part is None:
            return
        self._unloaded[part.name].discard(full)
        if not self._unloaded[part.name]:
            with _disk_errors(self._writer.path):
                self._writer.write(part, {key: value_of(model, key) for key in part.parameters})
            for key in part.parameters:
                _release(model, key)
        return_freed_memory()  # a CPU quantises with 14 bytes for each element of a matrix


def _release(model: torch.nn.Module, name: str) -> None:
    """Free a parameter's memory; transformers still sees it as loaded, of size 0."""
    path, _, attribute = name.rpartition(".")
    module: Any = model.get_submodule(path)
    parameter = module._parameters[attribute]
    parameter.data = parameter.data.new_empty(0)
    if hasattr(parameter, "quant_state"):
        parameter.quant_state = module.quant_state = None


def value_of(model: torch.nn.Module, name: str) -> Any:
    """The parameter, buffer or attribute of this name. Raises LayoutMismatch where there is none, or where it has no values."""
    path, _, attribute = name.rpartition(".")
    value = getattr(model.get_submodule(path), attribute, None)
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise LayoutMismatch(f"{name} was not loaded")
    return value


def load_base(settings: Settings, config: PretrainedConfig, device: Device, log: Log) -> PreTrainedModel:
    """The base model on `device`, with layers offloaded as the recipe has it: of 4-bit weights through the model's file.

    Without disk space for the file it is loaded from its checkpoint, and `log` is called.
    """
    if settings.layer_offloading is not False and base_format_of(settings).quantised_file:
        try:
            return base_from(open_store(settings, config, device, log), settings, config, device)
        except (DiskFull, LayoutMismatch) as error:
            log(f"{error}. Its weights are quantised again at every start instead.")
    return build.build_base(settings, config, device=device, weights=True, offloads=True)


def base_from(store: Store, settings: Settings, config: PretrainedConfig, device: Device) -> PreTrainedModel:
    """The base model on `device` with the weights of its file, as `build_base` would load them, with layers offloaded."""
    base = build.build_base(settings, config, device=device, weights=False)
    offloading = None if settings.layer_offloading is False else offload_layers(base, settings, weights=True, store=store)
    books = code_books(store, device)
    for part in [store.parts[-1], *store.parts[:-1]]:
        fill(base, store, part, books, device)
        if offloading is not None:
            for path, _, name in (parameter.rpartition(".") for parameter in part.parameters):
                offloading.on_parameter_loaded(base.get_submodule(path), name)
    if offloading is not None:
        offloading.finish()
        base.layer_offloading = offloading  # type: ignore[assignment]
    base.quantised_store = store  # type: ignore[assignment]
    return as_loaded(base, settings)


def require_unchanged_file(model: torch.nn.Module) -> None:
    """Raise FinetuneError when the file that a model reads its weights from has changed since the model was loaded."""
    stores = (vars(module).get("quantised_store") for module in model.modules())
    for store in filter(None, stores):
        try:
            store.require_unchanged()
        except Damaged as error:
            raise FinetuneError(
                f"{error}, while the run read it: what it has learnt since its last checkpoint is dropped",
                "Resume it: the file is made again.",
            ) from None


def as_loaded(base: PreTrainedModel, settings: Settings) -> PreTrainedModel:
    """A base whose weights were set, in the state of one that transformers has loaded."""
    from transformers import GenerationConfig

    path = resolve_model_path(settings)
    base.name_or_path = base.config.name_or_path = path
    if base.can_generate():
        with build.load_errors(path), contextlib.suppress(OSError):  # there need not be any
            base.generation_config = GenerationConfig.from_pretrained(path, revision=settings.model_revision or "main")
    return base.eval()


def code_books(store: Store, device: Device) -> dict[str, torch.Tensor]:
    """The code books of the file's 4-bit weights; empty where it has none."""
    outside = store.parts[-1]
    return {entry.name: store.rows(outside, entry).to(device) for entry in outside.entries if entry.name in BOOKS}


def fill(base: torch.nn.Module, store: Store, part: Part, books: Mapping[str, torch.Tensor], device: Device) -> None:
    """Load the parameters and buffers of a part, which are on meta, onto `device`, at each use in the model."""
    uses = parameter_uses(base)
    tables: dict[str, dict[str, torch.Tensor]] = {}
    for entry in part.entries:
        if entry.table:
            tables.setdefault(entry.name, {})[entry.table] = store.rows(part, entry).to(device)
    for entry in part.entries:
        if entry.table or entry.name in BOOKS:
            continue
        data = store.rows(part, entry).to(device)
        state = store.quant_state(entry.name, tables[entry.name], books) if entry.name in tables else None
        set_value(base, entry.name, data, state, uses)


#: The modules and names of each parameter: tied ones have several.
ParameterUses = dict[int, list[tuple[torch.nn.Module, str]]]


def parameter_uses(model: torch.nn.Module) -> ParameterUses:
    """The modules and names that use each parameter, by its id."""
    uses: ParameterUses = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(id(parameter), []).append((module, name))
    return uses


def set_value(base: torch.nn.Module, name: str, data: torch.Tensor, state: Any, uses: ParameterUses) -> None:
    """Set a parameter at each of its uses, or a buffer or attribute."""
    from bitsandbytes.nn import Params4bit

    path, _, attribute = name.rpartition(".")
    module: Any = base.get_submodule(path)
    old = module._parameters.get(attribute)
    if old is None:
        setattr(module, attribute, data)
        return
    parameter: Any
    if state is None:
        parameter = torch.nn.Parameter(data, requires_grad=False)
    else:
        parameter = Params4bit(data, requires_grad=False, **{**vars(old), "quant_state": state, "bnb_quantized": True})
        if parameter.module is not None:
            parameter.module.quant_state = state
    for owner, own in uses[id(old)]:
        owner._parameters[own] = parameter
