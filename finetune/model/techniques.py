"""Memory techniques of a plan, applied for training and for the forecast."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from finetune.layers.checkpointing import checkpoint_layers, decoder_layers, outside_layers, undo_checkpointing
from finetune.layers.compiled import compile_layers, undo_compiling, use_operators
from finetune.layers.host_memory import is_in_forecast
from finetune.layers.layer_offloading import offload_embedding, offloading_of
from finetune.layers.lean_layers import make_lean, tile_mlps, undo_lean
from finetune.layers.offload import SavedActivations, offload_beside
from finetune.model.cpu_adamw import CpuAdamW
from finetune.settings import Settings
from finetune.settings.compatibility import is_zero3

#: This project's optimizers by name in a recipe; all other names are transformers'.
_OPTIMIZERS = {"adamw_cpu_offload": CpuAdamW}


def apply_techniques(model: torch.nn.Module, settings: Settings) -> None:
    """Apply lean layers, gradient checkpointing, compilation and an offloaded embedding; callable again with other settings."""
    layers, in_forecast = decoder_layers(model), any(map(is_in_forecast, model.parameters()))
    undo_compiling(layers)
    modules = [*layers, *outside_layers(model)]
    (make_lean if settings.lean_layers is True else undo_lean)(modules)
    # an embedding in host memory stays there; a forecast moves it once it is loaded
    if settings.offload_embeddings is True and not in_forecast:
        offload_embedding(model)
    checkpointing = settings.activation_checkpointing
    if checkpointing is False:
        undo_checkpointing(model)
    else:
        checkpoint_layers(
            model,
            every_n_layers=settings.activation_checkpointing_every_n_layers,
            selective=checkpointing == "selective",
            offload=checkpointing == "offload" and not settings.torch_compile,
            reentrant=is_zero3(settings.launch),
        )
    if (offloading := offloading_of(model)) is not None:
        offloading.wrap_checkpoints()
    if settings.lean_layers is True:
        tile_mlps([layer for layer in layers if layer.gradient_checkpointing], settings.mlp_tile_tokens)
    if settings.torch_compile:
        use_operators(layers)
        if not in_forecast:
            # a forecast splits layers itself, as the compiler would
            compile_layers(layers)


def step_context(settings: Settings, device: torch.device | str) -> contextlib.AbstractContextManager[Any]:
    """Return the context for forward and backward of a micro-batch: hooks on saved activations, or none."""
    # compiled layers offload their inputs by hooks around the whole step: hooks inside would break a layer's graph
    if settings.torch_compile and settings.activation_checkpointing == "offload":
        return SavedActivations(offload_beside(torch.device(device)))
    return contextlib.nullcontext()


def training_arguments(settings: Settings) -> dict[str, Any]:
    """Return the SFTConfig fields of the memory techniques."""
    return {
        # `apply_techniques` has turned it on in the model: TRL would add it again
        "activation_checkpointing": False,
        "optim": "adamw_torch" if settings.optim in _OPTIMIZERS else settings.optim,
    }


def optimizer_class(settings: Settings) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Return Trainer's `optimizer_cls_and_kwargs` for this project's optimizers, or None."""
    if settings.optim not in _OPTIMIZERS:
        return None
    return _OPTIMIZERS[settings.optim], {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
