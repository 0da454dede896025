"""Merge the adapter into the base model's 16-bit weights, as a standard model folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from finetune.errors import CommandError, DiskFull, OutOfMemory
from finetune.export.whole_checkpoint import OTHER_WEIGHTS, write_merged_checkpoint
from finetune.files import existing_parent, free_disk_bytes
from finetune.plan.plan import read_plan
from finetune.recipe import resolved
from finetune.run.directory import require_intact_adapter
from finetune.run.failures import is_disk_full
from finetune.system import rename
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.run.directory import RunDirectory

_MARGIN_BYTES = 2**30  # for python, torch and the shard being written


def merge(run: RunDirectory, target: Path | None = None, *, progress: Callable[[str], None] = lambda _: None) -> Path:
    """Write base + adapter to `target` (default RUN/merged) atomically. Returns the folder.

    The base is loaded unquantised: merging into 4-bit weights would round the adapter away. Raises RecipeError without a
    finished adapter, OutOfMemory and DiskFull without room, before anything is loaded.
    """
    target = target or run.path / "merged"
    if not run.adapter.is_dir():
        raise CommandError(f"{run.path} has no adapter yet", f"Finish it: finetune resume {run.path}")
    require_intact_adapter(run.adapter)
    if target.exists():
        raise CommandError(f"{target} exists already", "Delete or rename it, or give another --output.")
    settings = resolved(read_plan(run.plan).settings, load_in_4bit=False, load_in_8bit=False)
    _check_room(settings, target)
    building = target.with_name(f".{target.name}")
    try:
        shutil.rmtree(building, ignore_errors=True)
        _write(settings, run, building, progress)
        rename(building, target)
    except Exception as error:
        if not isinstance(error, OSError) and not is_disk_full(error):
            raise
        raise DiskFull(
            f"{target} could not be written: {error}", "Free some space and try again; no partial files are left."
        ) from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return target


def _write(settings: Any, run: RunDirectory, folder: Path, progress: Callable[[str], None]) -> None:
    from peft import PeftModel

    from finetune.data.tokenizer import run_tokenizer
    from finetune.model.build import build_base, load_config
    from finetune.model.language_model import is_multimodal
    from finetune.model.quiet import quiet_libraries

    quiet_libraries()
    progress("loading the base model in 16 bit")
    config = load_config(settings)
    base = build_base(settings, config, device="cpu", weights=True)
    progress("merging")
    merged: Any = PeftModel.from_pretrained(base, str(run.adapter), use_safetensors=True).merge_and_unload(safe_merge=True)
    progress("writing")
    if is_multimodal(config):
        write_merged_checkpoint(merged, _folder_of(settings), folder)
        if settings.chat_template is None:
            return  # the model's own tokenizer and processor are there
    else:
        merged.save_pretrained(str(folder), safe_serialization=True)
    run_tokenizer(run.adapter, settings).save_pretrained(str(folder))


def _folder_of(settings: Any) -> Path:
    """The folder with the model's files, which for a model of the hub are in its cache or fetched now."""
    from huggingface_hub import snapshot_download

    from finetune.model.build import resolve_model_path

    place = resolve_model_path(settings)
    if Path(place).is_dir():
        return Path(place)
    return Path(
        snapshot_download(place, revision=settings.model_revision, ignore_patterns=[f"*{end}" for end in OTHER_WEIGHTS])
    )


def _check_room(settings: Any, target: Path) -> None:
    from finetune.model.build import load_config, model_dtype

    needed = _weight_bytes(load_config(settings), model_dtype(settings))
    free_ram = psutil.virtual_memory().available
    if needed + _MARGIN_BYTES > free_ram:
        raise OutOfMemory(
            f"merging needs the whole model in host memory: {format_bytes(needed)}, but {format_bytes(free_ram)} are free",
            "Close other programs, or use the adapter without merging: servers can load base + adapter.",
        )
    place, free_disk = existing_parent(target), free_disk_bytes(target)
    if needed > free_disk:
        raise DiskFull(
            f"the merged model needs {format_bytes(needed)}, but {place} has {format_bytes(free_disk)} free",
            "Give another --output.",
        )


def _weight_bytes(config: Any, dtype: Any) -> int:
    """Bytes of the loaded weights, counted on the meta device."""
    from finetune.model.build import build_on_meta

    model = build_on_meta(config, None, dtype=dtype, attention=None)
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
