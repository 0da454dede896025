"""Merge the adapter into 16-bit weights, as a standard model folder."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from huggingface_hub import snapshot_download
from peft import PeftModel
from transformers.core_model_loading import revert_weight_conversion

from finetune.compat.transformers import quiet_libraries
from finetune.data.report import first_line
from finetune.data.tokenizer import read_tokenizer
from finetune.errors import CommandError, DiskFull, ModelError, OutOfMemory, is_disk_full
from finetune.export import shards
from finetune.files import existing_parent, free_disk_bytes, read_json
from finetune.model.adapters import grow_vocabulary
from finetune.model.build import build_base, build_on_meta, model_dtype
from finetune.model.configuration import resolve_model_path
from finetune.model.language_model import is_multimodal
from finetune.model.transformers_config import load_config
from finetune.planner.plan import read_plan
from finetune.run.directory import RunDirectory
from finetune.run.fingerprint import require_own_adapter
from finetune.settings import resolved
from finetune.settings.base_formats import BITS_16, switches
from finetune.system import rename
from finetune.units import Progress, format_bytes

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


def write_merged(settings: Any, adapter: Path, folder: Path, max_shard_bytes: int | None, progress: Progress) -> None:
    """Write a standard model folder. Raise OutOfMemory or DiskFull before anything is written."""
    quiet_libraries()
    config, source = load_config(settings), model_folder(settings)
    # tensor by tensor if possible: the whole model need not fit into memory
    stored, is_streamed = shards.stored_tensors(source), True
    try:
        tensors = _merged_on_read(settings, config, adapter, stored, progress)
    except shards.StoredOtherwiseError:
        tensors, is_streamed = _merged_in_memory(settings, config, adapter, folder, stored, progress), False
        max_shard_bytes = max_shard_bytes or _FILE_BYTES  # the base's files hold other tensors
    require_disk(sum(tensor.size_bytes for tensor in tensors), folder)
    folder.mkdir(parents=True)
    progress("writing")
    shards.write_tensors(tensors, folder, max_bytes=max_shard_bytes, progress=progress)
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


def _merged_on_read(
    settings: Any, config: Any, adapter: Path, stored: list[shards.Tensor], progress: Progress
) -> list[shards.Tensor]:
    if getattr(config, "quantization_config", None) or settings.trained_embedding_rows:
        raise shards.StoredOtherwiseError("the base model is stored quantised, or its vocabulary grows")
    _check_memory(4 * max(tensor.size_bytes for tensor in stored), "four times the largest tensor")
    progress("reading the adapter")
    base = build_base(settings, config, device="meta", weights=True)
    return shards.merged_tensors(shards.with_adapter(base, adapter), stored)


def _merged_in_memory(
    settings: Any, config: Any, adapter: Path, folder: Path, stored: list[shards.Tensor], progress: Progress
) -> list[shards.Tensor]:
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
    tensors = [shards.tensor_in_memory(name, tensor) for name, tensor in values.items()]
    if not is_multimodal(config):
        return tensors
    # only the language model was loaded: add the other stored tensors, except the scales of the merged ones
    merged_names = {tensor.name for tensor in tensors}
    others = [tensor for tensor in stored if _QUANTISED_PART.sub("", tensor.name) not in merged_names]
    return tensors + [replace(tensor, file=tensors[0].file) for tensor in others]


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
