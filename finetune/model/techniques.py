"""Applies a plan's memory techniques: for training on a device, and for the forecast on fake tensors."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from finetune.layers.adapted_linear import undo_operators, use_operators
from finetune.layers.checkpointing import decoder_layers, outside_layers, recompute, recomputed_layers, turn_off_checkpointing
from finetune.layers.compiled import compile_layers, undo_compiling
from finetune.layers.host_embedding import offload_table
from finetune.layers.host_memory import is_forecast
from finetune.layers.layer_offloading import offloading_of
from finetune.layers.lean_layers import make_lean, tile_mlps, undo_lean
from finetune.layers.offload import offload_beside
from finetune.layers.saved_activations import SavedActivations
from finetune.model.cpu_adamw import CpuAdamW
from finetune.settings import Settings
from finetune.settings.compatibility import is_zero3

#: This project's optimizers, by their names in a recipe; all others are transformers' names.
_OWN = {"adamw_cpu_offload": CpuAdamW}


def apply_techniques(model: torch.nn.Module, settings: Settings) -> None:
    """Apply lean layers, gradient checkpointing, per-layer compilation and an input embedding in host memory, in place. May be
    called again with other settings; the embedding then stays in host memory.

    `model` is a transformers model or a PeftModel of one. A forecast's layers are split as the compiler would split them,
    by the forecast, and its embedding is moved once it is loaded.
    """
    undo_compiling(decoder_layers(model))
    undo_operators(decoder_layers(model))
    (make_lean if settings.lean_layers is True else undo_lean)([*decoder_layers(model), *outside_layers(model)])
    if settings.offload_embeddings is True and not _is_forecasts(model):
        offload_table(model)
    checkpointing = settings.activation_checkpointing
    if checkpointing is False:
        turn_off_checkpointing(model)
    else:
        recompute(
            model,
            every_n_layers=settings.activation_checkpointing_every_n_layers,
            selective=checkpointing == "selective",
            offload=checkpointing == "offload" and not settings.torch_compile,
            reentrant=is_zero3(settings.launch),
        )
    if (offloading := offloading_of(model)) is not None:
        offloading.wrap_checkpoints()
    if settings.lean_layers is True:
        tile_mlps(recomputed_layers(model), settings.mlp_tile_tokens)
    if settings.torch_compile:
        use_operators(decoder_layers(model))
        if not _is_forecasts(model):
            compile_layers(decoder_layers(model))


def _is_forecasts(model: torch.nn.Module) -> bool:
    return any(is_forecast(parameter) for parameter in model.parameters())


def step_context(settings: Settings, device: torch.device | str) -> contextlib.AbstractContextManager[Any]:
    """Context for forward and backward of one micro-batch: hooks on saved activations, or none.

    `device` is the batch's; for CUDA the host copies are pinned, and copied beside the computation.
    """
    # compiled layers offload their inputs by hooks around the whole step: hooks inside would break a layer's graph
    offloads_layer_inputs = settings.torch_compile and settings.activation_checkpointing == "offload"
    offload = settings.activation_offloading or offloads_layer_inputs
    if not (offload or settings.int8_activations):
        return contextlib.nullcontext()
    beside = offload_beside(torch.device(device)) if offload else None
    return SavedActivations(offload=beside, int8=settings.int8_activations)


def training_arguments(settings: Settings) -> dict[str, Any]:
    """Fields of SFTConfig (TrainingArguments). Checkpointing is off there, as `apply_techniques` has turned it on in the
    model; transformers and TRL would add theirs on top."""
    return {
        "activation_checkpointing": False,
        "activation_offloading": False,
        "optim": "adamw_torch" if settings.optim in _OWN else settings.optim,
    }


def optimizer_class(settings: Settings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Trainer's `optimizer_cls_and_kwargs` for this project's optimizers; None for an optimizer of transformers."""
    if settings.optim not in _OWN:
        return None
    return _OWN[settings.optim], {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
