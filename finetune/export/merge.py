"""Merge the adapter into the base model's 16-bit weights, as a standard model folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from finetune.data.report import first_line
from finetune.error_kinds import is_disk_full
from finetune.errors import CommandError, DiskFull, ModelError, OutOfMemory
from finetune.files import existing_parent, free_disk_bytes, read_json, read_safetensors_header
from finetune.planner.plan import read_plan
from finetune.run.directory import RunDirectory
from finetune.run.fingerprint import require_own_adapter
from finetune.settings import resolved
from finetune.settings.base_formats import BITS_16, switches
from finetune.system import rename
from finetune.units import format_bytes

if TYPE_CHECKING:
    import torch


_MARGIN_BYTES = 2**30  # for python, torch and the tensor being written
#: Weights in other formats, which would still have their old values.
OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite"}


def merge(
    run: RunDirectory,
    target: Path | None = None,
    *,
    max_shard_bytes: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Path:
    """Write base + adapter to `target` (default RUN/merged) atomically. Returns the folder.

    The 16-bit weights are read and written tensor by tensor: merging into 4-bit weights would round the adapter away, and the
    whole model need not fit into memory. Files are split like the base model's, or at `max_shard_bytes`. Raises CommandError
    without a finished adapter, OutOfMemory and DiskFull if memory or disk don't suffice, before anything is written.
    """
    target = target or run.path / "merged"
    if not run.adapter.is_dir():
        raise CommandError(f"{run.path} has no adapter yet", f"Finish it: finetune resume {run.path}")
    require_own_adapter(run, run.adapter, reread=True)
    settings = resolved(read_plan(run.plan).settings, **switches(BITS_16))
    with written_folder(target) as building:
        _write(settings, run, building, max_shard_bytes, progress)
    return target


@contextmanager
def written_folder(target: Path) -> Iterator[Path]:
    """Yields a hidden folder, not made yet, that gets the name `target` at the end, or is removed.

    Raises CommandError where `target` exists, DiskFull.
    """
    if target.exists():
        raise CommandError(f"{target} exists already", "Delete or rename it, or give another --output.")
    building = target.with_name(f".{target.name}")
    shutil.rmtree(building, ignore_errors=True)
    try:
        yield building
        rename(building, target)
    except Exception as error:
        if not isinstance(error, OSError) and not is_disk_full(error):
            raise
        fix = "Free some space and try again; no partial files are left."
        raise DiskFull(f"{target} could not be written: {error}", fix) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _write(
    settings: Any, run: RunDirectory, folder: Path, max_shard_bytes: int | None, progress: Callable[[str], None]
) -> None:
    from finetune.data.tokenizer import run_tokenizer
    from finetune.export.shards import ShardMergeError
    from finetune.model.language_model import is_multimodal
    from finetune.model.library_warnings import quiet_libraries
    from finetune.model.transformers_config import load_config

    quiet_libraries()
    config = load_config(settings)
    try:
        _merge_by_shards(settings, config, run, folder, max_shard_bytes, progress)
    except ShardMergeError:
        shutil.rmtree(folder, ignore_errors=True)
        _merge_loaded(settings, config, run, folder, max_shard_bytes, progress)
    if settings.trained_embedding_rows:
        _write_vocabulary(folder, settings.trained_embedding_rows[1])
    elif is_multimodal(config) and settings.chat_template is None:
        return  # the model's own tokenizer and processor are copied already
    run_tokenizer(run.adapter, settings).save_pretrained(str(folder))


def _write_vocabulary(folder: Path, rows: int) -> None:
    """Write a grown vocabulary into config.json, where the model has fewer rows."""
    path = folder / "config.json"
    values = read_json(path, dict)
    parts = [part for part in (values, values.get("text_config")) if isinstance(part, dict) and "vocab_size" in part]
    for part in parts:
        part["vocab_size"] = max(part["vocab_size"], rows)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _merge_by_shards(
    settings: Any, config: Any, run: RunDirectory, folder: Path, max_shard_bytes: int | None, progress: Callable[[str], None]
) -> None:
    """Read and write one tensor at a time. Raises ShardMergeError, before anything is written, if that is impossible."""
    from finetune.export.shards import AdapterChanges, ShardMergeError, stored_tensors, with_adapter, write_shards
    from finetune.model.build import build_base
    from finetune.model.new_tokens import grow_vocabulary

    if getattr(config, "quantization_config", None):
        raise ShardMergeError("the base model is stored quantised")
    source = model_folder(settings)
    tensors = stored_tensors(source)
    require_disk(sum(stored.size for stored in tensors), folder)
    progress("reading the adapter")
    base = build_base(settings, config, device="meta", weights=True)
    grow_vocabulary(base, settings, None)
    changes = AdapterChanges(with_adapter(base, run.adapter), tensors)
    _check_memory(4 * max(stored.size for stored in tensors), "the largest tensor and its change")
    folder.mkdir(parents=True)
    progress("writing")
    write_shards(tensors, changes, folder, max_bytes=max_shard_bytes, progress=progress)
    for path in sorted(source.iterdir()):  # last: without them a part of a model does not load
        if path.is_file() and path.suffix not in (*OTHER_WEIGHTS, ".safetensors") and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)


def _merge_loaded(
    settings: Any, config: Any, run: RunDirectory, folder: Path, shard_bytes: int | None, progress: Callable[[str], None]
) -> None:
    """Load the whole model and write it as transformers does: for checkpoints that store weights in another form."""
    from peft import PeftModel

    from finetune.model.build import build_base, build_on_meta
    from finetune.model.language_model import is_multimodal
    from finetune.model.new_tokens import grow_vocabulary
    from finetune.model.quantisation import model_dtype

    model = build_on_meta(config, None, dtype=model_dtype(settings), attention=None)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    _check_memory(weight_bytes, "the whole model, whose weights are stored in another form,")
    require_disk(weight_bytes, folder)
    progress("loading the base model in 16 bit")
    base = build_base(settings, config, device="cpu", weights=True)
    grow_vocabulary(base, settings, None)
    progress("merging")
    merged: Any = PeftModel.from_pretrained(base, str(run.adapter), use_safetensors=True).merge_and_unload(safe_merge=True)
    progress("writing")
    if is_multimodal(config):
        write_merged_checkpoint(merged, model_folder(settings), folder)
        return
    merged.save_pretrained(str(folder), safe_serialization=True, **({"max_shard_size": shard_bytes} if shard_bytes else {}))
    for path in folder.glob("*.safetensors"):  # which its library makes readable by their owner only
        shutil.copymode(folder / "config.json", path)


def model_folder(settings: Any) -> Path:
    """The folder with the model's files; those of a hub model come from its cache or are downloaded. Raises ModelError."""
    from huggingface_hub import snapshot_download

    from finetune.model.configuration import resolve_model_path

    path_or_id = resolve_model_path(settings)
    if Path(path_or_id).is_dir():
        return Path(path_or_id)
    ignored = [f"*{suffix}" for suffix in OTHER_WEIGHTS]
    try:
        return Path(snapshot_download(path_or_id, revision=settings.model_revision, ignore_patterns=ignored))
    except OSError as error:  # the hub's own errors are among them
        if is_disk_full(error):
            raise
        fix = "Its weights must be on this disk or reachable on the hub (gated models: `hf auth login`)."
        raise ModelError(f"model_name_or_path {path_or_id}: {first_line(error)}", fix) from None


def _check_memory(needed_bytes: int, purpose: str) -> None:
    free_bytes = psutil.virtual_memory().available
    if needed_bytes + _MARGIN_BYTES > free_bytes:
        raise OutOfMemory(
            f"merging needs {purpose} in host memory: {format_bytes(needed_bytes)}, but {format_bytes(free_bytes)} are free",
            "Close other programs, or use the adapter without merging: servers can load base + adapter.",
        )


def require_disk(needed_bytes: int, target: Path, what: str = "the merged model") -> None:
    """Raise DiskFull when less is free where `target` will be."""
    existing, free_bytes = existing_parent(target), free_disk_bytes(target)
    if needed_bytes > free_bytes:
        raise DiskFull(
            f"{what} needs {format_bytes(needed_bytes)}, but {existing} has {format_bytes(free_bytes)} free",
            "Give another --output.",
        )


def write_merged_checkpoint(model: Any, source: Path, target: Path) -> list[str]:
    """Copy the folder `source` to `target` with the tensors that differ in `model`; returns their names in the files.

    `model`: loaded by transformers from `source`, then changed. Raises CommandError if `source` lacks one of its tensors.
    """
    from transformers.core_model_loading import revert_weight_conversion

    target.mkdir(parents=True)
    tensors: dict[str, torch.Tensor] = dict(model.state_dict())
    for name in getattr(model, "all_tied_weights_keys", {}):
        tensors.pop(name, None)
    remaining = revert_weight_conversion(model, tensors)
    changed = []
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            shutil.copyfile(path, target / path.name)
            changed += _replace_changed(target / path.name, remaining)
        elif path.is_file() and path.suffix not in OTHER_WEIGHTS:
            shutil.copyfile(path, target / path.name)
    if remaining:
        missing = f"{next(iter(remaining))} ({len(remaining)} such)"
        raise CommandError(
            f"{source} has no tensor {missing}, so the merged model can't be written in its form",
            "Use the adapter without merging: servers can load base + adapter.",
        )
    return changed


def _replace_changed(path: Path, remaining: dict[str, torch.Tensor]) -> list[str]:
    """Overwrite the tensors of a safetensors file that differ from `remaining`, and remove the file's tensors from it."""
    import torch
    from safetensors import safe_open

    changed: dict[str, bytes] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            if name not in remaining:
                continue
            new, old = remaining.pop(name), file.get_tensor(name)
            if new.shape != old.shape:
                raise CommandError(f"{path.name}: {name} has shape {tuple(old.shape)}, merged {tuple(new.shape)}")
            if not torch.equal(old.to(new.dtype), new):
                changed[name] = new.to(old.dtype).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    with path.open("r+b") as output:
        header, data_begin = read_safetensors_header(output)
        for name, data in changed.items():
            begin, end = header[name]["data_offsets"]
            assert end - begin == len(data)
            output.seek(data_begin + begin)
            output.write(data)
    return list(changed)
