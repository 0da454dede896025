"""Settings that can't be combined, also with images. Imports nothing heavy, so every entry point reports them early."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from finetune.settings.base_formats import AUTO, INT8, NF4
from finetune.settings.methods import METHODS, methods_reading
from finetune.settings.optimizers import OPTIMIZERS
from finetune.units import parse_bytes

if TYPE_CHECKING:
    from finetune.settings.schema import Recipe


#: Kinds of gradient checkpointing that are not reentrant; DeepSpeed ZeRO-3 needs reentrant checkpointing.
NOT_REENTRANT = ("selective", "offload")
#: Layers with a buffer on the GPU under layer offloading: the computing and the arriving layer. A pass ends with the layers
#: that the next pass begins with, and need not be fetched.
BUFFERS = 2


def loads_own_rows(settings: Recipe) -> bool:
    """Tell whether each rank loads only its own rows of the weights: FSDP with 4-bit weights."""
    # DoRA's magnitudes are computed from whole weights
    return settings.launch.strategy == "fsdp" and settings.base_format.bits == 4 and not settings.use_dora


def problems(recipe: Recipe) -> Iterator[str]:
    """Yield combinations that fail on any machine, one line each."""
    rules = (
        _method, _adapter_dtype, _new_tokens, _quantisation, _batch, _checkpointing, _lean, _layer_offloading, _sharding,
        _launch, _run, vision_problems,
    )  # fmt: skip
    # `auto` settings are not checked: the planner chooses only among allowed values
    for rule in rules:
        yield from rule(recipe)


def _method(recipe: Recipe) -> Iterator[str]:
    if recipe.method == AUTO:  # checked again when the rows have decided the method
        return
    name, method = recipe.method, recipe.training_method
    for setting in dict.fromkeys(setting for other in METHODS.values() for setting in other.settings):
        if setting not in method.settings and getattr(recipe, setting) is not None:
            *others, last = (other_name for other_name, other in METHODS.items() if setting in other.settings)
            methods = f"{', '.join(others)} and {last}" if others else last
            yield f"{setting} is a setting of method {methods}; the method is {name}"
    if recipe.loss_type is not None and recipe.loss_type not in method.losses and method.losses:
        yield f"loss_type {recipe.loss_type} is not one of method {name}: {', '.join(method.losses)}"
    for setting, reason in method.refused:
        if getattr(recipe, setting) not in (None, False, AUTO):
            yield f"{setting} does not work with method {name}: {reason}"
    if (recipe.loss_type == "robust") != (recipe.label_smoothing is not None):
        yield "loss_type robust and label_smoothing (share of pairs in the wrong order) go together; set both or neither"
    yield from _min_rows(recipe)
    row_format = recipe.dataset.format
    if row_format != AUTO and name not in (readers := methods_reading(row_format)):
        yield f"dataset.format {row_format} is for method {' or '.join(readers)}; the method is {name}"
    if method.reference_passes and recipe.launch.is_sharded:
        yield f"launch.strategy {recipe.launch.strategy} does not work with method {name} yet; use ddp"


def _min_rows(recipe: Recipe) -> Iterator[str]:
    least_rows, world_size = recipe.training_method.min_rows, recipe.launch.num_processes
    if least_rows == 1:
        return
    reason = "its KL term needs an answer to another prompt; loss_type apo_zero_unpaired has no KL term"
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        if (rows := getattr(recipe, name)) not in (AUTO, None) and rows < least_rows:
            yield f"{name} {rows} is too small for method {recipe.method}, use {least_rows} or more: {reason}"
    batch, steps = recipe.effective_batch_size, recipe.gradient_accumulation_steps
    rows = None if batch == AUTO else batch // (world_size * (1 if steps == AUTO else steps))
    if rows is not None and rows < least_rows:
        yield f"effective_batch_size {batch} leaves a micro-batch of {rows} for method {recipe.method}: {reason}"


def _adapter_dtype(recipe: Recipe) -> Iterator[str]:
    if recipe.adapter_dtype == "float32":
        return
    dtype = recipe.adapter_dtype
    if recipe.dtype not in (AUTO, dtype):
        yield f"adapter_dtype {dtype} needs dtype {dtype}; dtype is {recipe.dtype}"
    if recipe.use_dora:
        yield f"adapter_dtype {dtype} does not work with use_dora, whose magnitudes are trained in fp32"
    if recipe.launch.is_sharded:
        yield f"adapter_dtype {dtype} does not work with launch.strategy {recipe.launch.strategy} yet; use ddp"


def _new_tokens(recipe: Recipe) -> Iterator[str]:
    rows = recipe.trained_embedding_rows
    if rows and (len(rows) != 2 or rows[0] >= rows[1]):
        yield f"trained_embedding_rows {rows} are not a first and end row; leave it out: the plan reads them from the tokenizer"
    if not (recipe.new_tokens or rows):
        return
    if recipe.launch.is_sharded:
        yield f"new_tokens do not work with launch.strategy {recipe.launch.strategy} yet; use ddp"
    if recipe.offload_embeddings is True:
        yield "offload_embeddings does not work with new_tokens, which train rows of the embedding; set it to auto or false"


def _quantisation(recipe: Recipe) -> Iterator[str]:
    if len(requested := recipe.requested_formats) > 1:
        yield f"{' and '.join(base.setting for base in requested)} are both true; keep one of them"


def _batch(recipe: Recipe) -> Iterator[str]:
    micro_batch, steps = recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps
    batch, world_size = recipe.effective_batch_size, recipe.launch.num_processes
    if AUTO not in (micro_batch, steps, batch) and micro_batch * steps * world_size != batch:
        yield (
            f"effective_batch_size {batch} is not per_device_train_batch_size {micro_batch} x gradient_accumulation_steps "
            f"{steps} x {world_size} process(es) = {micro_batch * steps * world_size}; leave one of them out"
        )
    if batch == AUTO:
        return
    for name, factor in (("per_device_train_batch_size", micro_batch), ("gradient_accumulation_steps", steps)):
        if factor != AUTO and batch % (factor * world_size):
            yield f"effective_batch_size {batch} can't be divided by {name} {factor} on {world_size} process(es)"
    if (micro_batch, steps) == (AUTO, AUTO) and batch % world_size:
        below = batch // world_size * world_size
        advice = f"use {f'{below} or ' if below else ''}{below + world_size}"
        yield f"effective_batch_size {batch} can't be divided over {world_size} processes; {advice}"


def _checkpointing(recipe: Recipe) -> Iterator[str]:
    checkpointing, every_n_layers = recipe.activation_checkpointing, recipe.activation_checkpointing_every_n_layers
    if recipe.launch.is_zero3 and checkpointing in NOT_REENTRANT:
        yield f"activation_checkpointing {checkpointing} does not work with DeepSpeed ZeRO-3; set it to true"
    if recipe.torch_compile is True and (reason := compiling_conflict(recipe)):
        yield f"torch_compile does not work with {reason}; set torch_compile to auto or false"
    if recipe.torch_compile is True and checkpointing == "offload" and every_n_layers not in (AUTO, 1):
        yield "activation_checkpointing offload with torch_compile needs activation_checkpointing_every_n_layers 1"


def compiling_conflict(recipe: Recipe) -> str:
    """Return the setting that rules out compiled layers, or an empty text."""
    if recipe.base_format is INT8:
        return "load_in_8bit: int8 products break the graph"
    if recipe.use_dora:
        return "use_dora: DoRA's norms break the graph"
    if recipe.attn_implementation == "flash_attention_2" and recipe.packing is not False:
        return "packing with flash_attention_2, which bakes row lengths into the graph; use torch_varlen"
    return ""


def padding_multiple(recipe: Recipe, rows: int) -> int:
    """Return the multiple of tokens to which a micro-batch of `rows` is padded."""
    # layers compiled for any length are compiled again for a length that breaks an assumption, such as divisibility by 8
    sequences = rows * recipe.training_method.sequences
    return 64 if recipe.torch_compile is True and sequences > 1 and recipe.packing is not True else 1


def lean_layers_conflict(recipe: Recipe) -> str:
    """Return the setting that rules out lean layers, or an empty text."""
    if recipe.torch_compile is True:
        return "torch_compile: lean layers break its graphs"
    if recipe.launch.is_zero3:
        return "DeepSpeed ZeRO-3, whose hooks are on the modules that lean layers replace"
    if recipe.use_dora:
        return "use_dora"
    return f"lora_dropout {recipe.lora_dropout:g}" if recipe.lora_dropout else ""


def _lean(recipe: Recipe) -> Iterator[str]:
    reason = lean_layers_conflict(recipe)
    if reason and recipe.lean_layers is True:
        yield f"lean_layers does not work with {reason}; set lean_layers to auto or false"
    if reason and recipe.mlp_tile_tokens not in (AUTO, 0):
        yield f"mlp_tile_tokens needs lean layers, which do not work with {reason}; set mlp_tile_tokens to auto or 0"


def layer_offloading_conflict(recipe: Recipe) -> str:
    """Return the setting that rules out layer offloading, and the fix; or an empty text."""
    checkpointing, every_n = recipe.activation_checkpointing, recipe.activation_checkpointing_every_n_layers
    reason = "backward fetches a layer's weights again when it recomputes the layer, so every layer must be recomputed"
    if checkpointing is False:
        return f"activation_checkpointing false: {reason}; set activation_checkpointing to auto or true"
    if every_n not in (AUTO, 1):
        name = "activation_checkpointing_every_n_layers"
        return f"{name} {every_n}: {reason}; set {name} to auto or 1"
    if recipe.torch_compile is True:
        return "torch_compile, which is untested with offloaded weights; set torch_compile=auto"
    if (base := recipe.base_format).not_offloaded:
        return f"{base.setting}: {base.not_offloaded}; use {NF4.setting}, or neither"
    if recipe.launch.is_sharded:
        return f"launch.strategy {recipe.launch.strategy}, which shards and moves the weights itself; use launch.offload"
    if recipe.launch.num_processes > 1:
        return (
            f"{recipe.launch.num_processes} processes: each would hold all layers in host memory; "
            "set launch.num_processes=1, or launch.strategy=fsdp launch.offload=cpu"
        )
    return ""


def _layer_offloading(recipe: Recipe) -> Iterator[str]:
    target, count = recipe.layer_offloading, recipe.offloaded_layers
    if target in (AUTO, False):
        if count not in (AUTO, 0):
            advice = "set layer_offloading=cpu, or offloaded_layers=0"
            yield f"offloaded_layers is {count}, but layer_offloading is {str(target).lower()}; {advice}"
        return
    if reason := layer_offloading_conflict(recipe):
        yield f"layer_offloading {target} does not work with {reason}"
    if count == 0:
        yield f"offloaded_layers is 0, but layer_offloading is {target}; set offloaded_layers to 1 or more"


def _sharding(recipe: Recipe) -> Iterator[str]:
    strategy = recipe.launch.strategy
    if not recipe.launch.is_sharded:
        return
    if recipe.gpu.strip().lower() == "cpu":
        yield f"launch.strategy {strategy} needs NVIDIA GPUs; on CPU use ddp"
    if not (base := recipe.base_format).shards:
        yield f"{base.setting} can't be sharded by launch.strategy {strategy}; use {NF4.setting}, or neither"
    if recipe.offload_embeddings is True:
        yield f"offload_embeddings needs the whole embedding, but launch.strategy {strategy} shards it; set it to auto or false"
    if recipe.optim != AUTO and not OPTIMIZERS[recipe.optim].shards:
        yield f"optim {recipe.optim} does not work on parameters sharded by {strategy}; use adamw_torch"


def _launch(recipe: Recipe) -> Iterator[str]:
    launch = recipe.launch
    processes, machines = launch.num_processes, launch.num_machines
    if processes % machines:
        yield f"launch.num_processes {processes} is not divisible by launch.num_machines {machines}"
    if launch.machine_rank >= machines:
        yield f"launch.machine_rank is {launch.machine_rank}; it must be below launch.num_machines, {machines}"
    if launch.strategy == "fsdp" and processes == 1:
        yield "launch.strategy fsdp shards the weights over several processes; launch.num_processes is 1"
    if launch.offload != "none" and not launch.is_sharded:
        yield f"launch.offload {launch.offload} needs fsdp or deepspeed; launch.strategy is ddp"
    if launch.offload == "nvme" and not launch.is_zero3:
        yield "launch.offload nvme needs DeepSpeed ZeRO-3: launch.strategy=deepspeed launch.zero_stage=3"
    if launch.offload == "nvme" and not launch.nvme_path:
        yield "launch.offload nvme needs launch.nvme_path, a directory on the drive"
    if launch.offload != "nvme" and launch.nvme_path:
        yield f"launch.nvme_path is set, but launch.offload is {launch.offload}"


def _run(recipe: Recipe) -> Iterator[str]:
    if recipe.early_stopping_patience and recipe.eval_steps == 0:
        yield "early_stopping_patience needs evaluations, but eval_steps is 0; leave one of them out"
    if recipe.trust_remote_code and not re.fullmatch("[0-9a-f]{40}", recipe.model_revision or ""):
        yield "trust_remote_code runs code from the hub: pin it with model_revision set to a full 40-character commit"
    if any(len(name.encode("utf-8", "replace")) > 255 for name in recipe.output_dir.split("/")):
        yield "output_dir has a name longer than 255 bytes; shorten it"
    for name in ("memory_budget", "host_memory"):
        size = getattr(recipe, name)
        if size not in (AUTO, None):
            try:
                parse_bytes(size)
            except ValueError as error:
                yield f"{name}: {error}"


#: Width and height of each image of a row, in pixels.
Sizes = tuple[tuple[int, int], ...]
#: Setting -> its only value that was checked with images, and why other values are refused.
ONLY_WITH_VISION: dict[str, tuple[Any, str]] = {
    "packing": (False, "a packed sequence does not record which image belongs to which row"),
    "layer_offloading": (False, "layers are not offloaded with a vision tower yet"),
    "offload_embeddings": (False, "the input embedding is not offloaded with a vision tower yet"),
    "torch_compile": (False, "layers are not compiled with a vision tower yet"),
    "load_in_8bit": (False, "int8 is untested with a vision tower; use load_in_4bit, or neither"),
    "use_dora": (False, "DoRA is untested with images"),
    "new_tokens": ({}, "embedding rows are not trained with a vision tower yet"),
    "trained_embedding_rows": ([], "embedding rows are not trained with a vision tower yet"),
    "trust_remote_code": (False, "images are read by transformers' own processors only"),
}


def vision_problems(recipe: Recipe) -> Iterator[str]:
    """Yield settings that can't be combined with images, one line each."""
    if recipe.vision is False and recipe.train_vision != "none":
        yield f"train_vision {recipe.train_vision} needs the vision tower, and vision is false"
    if recipe.vision is not True:
        return
    for name, (value, reason) in ONLY_WITH_VISION.items():
        if (recipe_value := getattr(recipe, name)) not in (value, "auto"):
            yield f"{name} {str(recipe_value).lower()} does not work with images: {reason}"
    if recipe.method not in ("sft", "auto"):
        yield f"method {recipe.method} does not work with images yet; use sft"
    if recipe.excess_length in ("truncate", "chunk"):
        yield f"excess_length {recipe.excess_length} does not work with images: it would cut image tokens; use drop"
    if recipe.launch.num_processes > 1 or recipe.launch.strategy != "ddp":
        yield "several processes do not work with images yet; set launch.num_processes=1 and launch.strategy=ddp"
