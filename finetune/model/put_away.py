"""A base model through its file of quantised weights: quantised layer by layer on the first start, read on every other.

Neither ever holds the whole model: on the first start each decoder layer leaves memory for the file when it is complete.
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
from typing import TYPE_CHECKING, Any

import torch

from finetune.compat.transformers import loading_in_order, quantised_on
from finetune.errors import DiskFull
from finetune.files import free_disk_bytes, write_text
from finetune.model import build
from finetune.model.configuration import resolve_model_path
from finetune.model.layer_offloading import offload_layers
from finetune.model.quantisation import quantization_config
from finetune.model.quantised_files import folder, lock_of, remove_unfinished
from finetune.model.quantised_store import (
    BOOKS,
    FORMAT,
    OUTSIDE,
    NotThisModel,
    Part,
    Store,
    StoreWriter,
    file_bytes,
    parts_of,
)
from finetune.model.weights import weights_fingerprint
from finetune.system import return_freed_memory, take_lock
from finetune.units import format_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from finetune.recipe import Settings

#: Called with what a user should know.
Say = Callable[[str], None]
_CLEAR = "`finetune cache clear` deletes what is kept of other models; FINETUNE_CACHE names a folder on another disk"
#: Libraries that decide which bytes a weight becomes.
_LIBRARIES = ("bitsandbytes", "transformers", "torch")


def open_store(settings: Settings, config: PretrainedConfig, device: torch.device | str | int, say: Say) -> Store:
    """The model's file, every part of it checked; made first where there is none, and again where it is damaged.

    `device` quantises. One process of a machine does the work, others that want the same file wait for it. Raises DiskFull when
    it can't be written and NotThisModel when this model can't be put away: then nothing is left of it.
    """
    shell = build.build_base(settings, config, device="cpu", weights=False)
    parts = parts_of(shell)
    facts = facts_of(settings, config, torch.device(device).type)
    path = folder() / f"{_slug(settings)}-{_key(facts)}.safetensors"
    with _held(path):
        try:
            return _checked(path, parts)
        except FileNotFoundError:
            pass
        except NotThisModel as error:
            say(f"{error}; it is made again")
            path.unlink(missing_ok=True)
        began = time.perf_counter()
        _make(path, parts, facts, settings, config, torch.device(device))
        took = f"{time.perf_counter() - began:,.0f} s on the {'card' if torch.device(device).type == 'cuda' else 'processor'}"
        say(f"the weights were quantised in {took} and are kept for later starts: {path}, {format_bytes(file_bytes(parts))}")
        _stamp(path)
        return Store(path)


def _checked(path: Path, parts: tuple[Part, ...]) -> Store:
    store = Store(path)
    if store.parts != parts:
        raise NotThisModel(f"{path} is laid out for other versions of the libraries")
    if _read(_stamp_of(path)) != _state(path):
        store.verify()
        _stamp(path)
    return store


def _state(path: Path) -> str:
    """Which file it is, and for whom it was checked: all processes of one launch on this machine have the same parent."""
    about = path.stat()
    return f"{os.getppid()} {about.st_ino} {about.st_size} {about.st_mtime_ns}"


def _stamp_of(path: Path) -> Path:
    return path.with_suffix(".checked")


def _stamp(path: Path) -> None:
    """Note that the file has been checked, so that the other processes of this launch needn't do it again."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        with contextlib.suppress(OSError):
            write_text(_stamp_of(path), _state(path))


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8")
    return ""


def facts_of(settings: Settings, config: PretrainedConfig, device_type: str) -> dict[str, Any]:
    """What decides the bytes of a model's file: the content of its weights, quantisation, dtype, and what computes it."""
    quantization = quantization_config(settings, config)
    return {
        "format": FORMAT, "model": settings.model_name_or_path, "weights": _fingerprint(settings),
        "quantisation": json.loads(quantization.to_json_string()) if quantization is not None else None,
        "dtype": settings.dtype, "quantised_on": device_type, "versions": {name: version(name) for name in _LIBRARIES},
    }  # fmt: skip


def _fingerprint(settings: Settings) -> str:
    """The hash of the weights, which are downloaded first where they are not here."""
    known = weights_fingerprint(settings)
    if known is None:
        from huggingface_hub import snapshot_download

        patterns = ["*.safetensors", "*.json", "*.py"]
        snapshot_download(resolve_model_path(settings), revision=settings.model_revision, allow_patterns=patterns)
        known = weights_fingerprint(settings)
    return str(known)


def _slug(settings: Settings) -> str:
    """The model's name, as far as a file's name can have it."""
    return re.sub(r"[^\w.-]+", "-", Path(settings.model_name_or_path).name)[:60]


def _key(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


@contextlib.contextmanager
def _held(path: Path) -> Iterator[None]:
    """Held by one process at a time; what a killed one left is removed. Raises DiskFull where the folder can't be used."""
    with _disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        while (lock := take_lock(lock_of(path), 0.5)) is None:
            time.sleep(0.05)
        remove_unfinished(path)
    try:
        yield
    finally:
        lock.release()


def _make(
    path: Path, parts: tuple[Part, ...], facts: Mapping[str, Any], settings: Settings, config: PretrainedConfig,
    device: torch.device,
) -> None:  # fmt: skip
    """Read the checkpoint, quantise each weight on `device`, and write the file. What is not a layer stays in host memory."""
    needed, free = file_bytes(parts), free_disk_bytes(path.parent)
    if needed > free:
        raise DiskFull(
            f"{path} needs {format_bytes(needed)}, {format_bytes(free)} are free there", f"Free some space: {_CLEAR}."
        )
    with _disk_errors(path), StoreWriter(path, parts) as writer:
        with quantised_on(device), loading_in_order(_PutAway(writer)):
            base = build.build_base(settings, config, device="cpu", weights=True)
        for part in writer.missing:
            writer.write(part, {name: value_of(base, name) for name in part.parameters})
        writer.finish(facts)


@contextlib.contextmanager
def _disk_errors(path: Path) -> Iterator[None]:
    """Raise errors of the disk as DiskFull, and of another kind of model as NotThisModel: while a checkpoint is read they would
    be taken for errors of its own."""
    try:
        yield
    except OSError as error:
        raise DiskFull(f"{path} can't be written: {error.strerror or error}", f"Free some space: {_CLEAR}.") from None
    except (KeyError, AttributeError) as error:
        raise NotThisModel(f"this model can't be kept in {path}: {type(error).__name__}: {error}") from error


class _PutAway:
    """Told of each parameter that has been loaded: a layer that is complete is written, and its memory is given back."""

    def __init__(self, writer: StoreWriter) -> None:
        self._writer = writer
        layers = [part for part in writer.parts if part.name != OUTSIDE]
        self._waits = {part.name: set(part.parameters) for part in layers}
        self._part_of = {name: part for part in layers for name in part.parameters}
        self._paths: dict[torch.nn.Module, str] = {}

    def __call__(self, model: torch.nn.Module, module: torch.nn.Module, name: str) -> None:
        self._paths = self._paths or {part: path for path, part in model.named_modules()}
        full = f"{self._paths[module]}.{name}"
        part = self._part_of.get(full)
        if part is None:
            return
        self._waits[part.name].discard(full)
        if not self._waits[part.name]:
            with _disk_errors(self._writer.path):
                self._writer.write(part, {one: value_of(model, one) for one in part.parameters})
            for one in part.parameters:
                _forget(model, one)
        return_freed_memory()  # a processor quantises in 14 bytes for each element of a matrix


def _forget(model: torch.nn.Module, name: str) -> None:
    """Give the memory of a parameter back; transformers still finds it, loaded and of no size."""
    path, _, attribute = name.rpartition(".")
    module: Any = model.get_submodule(path)
    parameter = module._parameters[attribute]
    parameter.data = parameter.data.new_empty(0)
    if hasattr(parameter, "quant_state"):
        parameter.quant_state = module.quant_state = None


def value_of(model: torch.nn.Module, name: str) -> Any:
    """The parameter, buffer or attribute of this name. Raises NotThisModel where there is none, or where it has no values."""
    path, _, attribute = name.rpartition(".")
    value = getattr(model.get_submodule(path), attribute, None)
    if not isinstance(value, torch.Tensor) or value.is_meta:
        raise NotThisModel(f"{name} was not loaded")
    return value


def load_base(settings: Settings, config: PretrainedConfig, device: torch.device | str | int, say: Say) -> PreTrainedModel:
    """The base model on `device`, with layers offloaded as the recipe has it: of 4-bit weights through the model's file.

    Without room for the file it is loaded from its checkpoint, which `say` is told.
    """
    if settings.layer_offloading is not False and settings.load_in_4bit is True:
        try:
            return base_from(open_store(settings, config, device, say), settings, config, device)
        except (DiskFull, NotThisModel) as error:
            say(f"{error}. Its weights are quantised again at every start instead.")
    return build.build_base(settings, config, device=device, weights=True, offloads=True)


def base_from(store: Store, settings: Settings, config: PretrainedConfig, device: torch.device | str | int) -> PreTrainedModel:
    """The base model on `device` with the weights of its file, as `build_base` would load them, with its offloaded layers."""
    base = build.build_base(settings, config, device=device, weights=False)
    offloading = None if settings.layer_offloading is False else offload_layers(base, settings, weights=True, store=store)
    books = code_books(store, device)
    for part in [store.parts[-1], *store.parts[:-1]]:
        fill(base, store, part, books, device)
        if offloading is not None:
            for path, _, name in (parameter.rpartition(".") for parameter in part.parameters):
                offloading.loaded(base.get_submodule(path), name)
    if offloading is not None:
        offloading.finish()
        base.layer_offloading = offloading  # type: ignore[assignment]
    return finished(base, settings)


def finished(base: PreTrainedModel, settings: Settings) -> PreTrainedModel:
    """A base whose weights are there now, in the state in which transformers leaves one that it has loaded."""
    from transformers import GenerationConfig

    path = resolve_model_path(settings)
    base.name_or_path = base.config.name_or_path = path
    if base.can_generate():
        with contextlib.suppress(OSError):  # there need not be any
            base.generation_config = GenerationConfig.from_pretrained(path, revision=settings.model_revision or "main")
    return base.eval()


def code_books(store: Store, device: torch.device | str | int) -> dict[str, torch.Tensor]:
    """The code books of the file's 4-bit weights; empty where it has none."""
    outside = store.parts[-1]
    return {entry.name: store.rows(outside, entry).to(device) for entry in outside.entries if entry.name in BOOKS}


def fill(
    base: torch.nn.Module, store: Store, part: Part, books: Mapping[str, torch.Tensor], device: torch.device | str | int
) -> None:
    """Give the parameters and buffers of a part, which are on meta, their values on `device`, wherever the model has them."""
    places = places_of(base)
    tables: dict[str, dict[str, torch.Tensor]] = {}
    for entry in part.entries:
        if entry.table:
            tables.setdefault(entry.name, {})[entry.table] = store.rows(part, entry).to(device)
    for entry in part.entries:
        if entry.table or entry.name in BOOKS:
            continue
        data = store.rows(part, entry).to(device)
        state = store.quant_state(entry.name, tables[entry.name], books) if entry.name in tables else None
        put(base, entry.name, data, state, places)


#: The modules and names of each parameter: tied ones have several.
Places = dict[int, list[tuple[torch.nn.Module, str]]]


def places_of(model: torch.nn.Module) -> Places:
    """Where each parameter is, by its id."""
    found: Places = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((module, name))
    return found


def put(base: torch.nn.Module, name: str, data: torch.Tensor, state: Any, places: Places) -> None:
    """Set a parameter, everywhere it is tied to, or a buffer or attribute."""
    from bitsandbytes.nn import Params4bit

    path, _, attribute = name.rpartition(".")
    module: Any = base.get_submodule(path)
    old = module._parameters.get(attribute)
    if old is None:
        setattr(module, attribute, data)
        return
    made: Any
    if state is None:
        made = torch.nn.Parameter(data, requires_grad=False)
    else:
        made = Params4bit(data, requires_grad=False, **{**vars(old), "quant_state": state, "bnb_quantized": True})
        if made.module is not None:
            made.module.quant_state = state
    for owner, own in places[id(old)]:
        owner._parameters[own] = made
