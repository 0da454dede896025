"""`lean` and `offload_layers`: this project's memory techniques on a model that another program has loaded."""

from __future__ import annotations

import torch

from finetune.errors import RecipeError
from finetune.layers.checkpointing import decoder_layers, outside_layers
from finetune.layers.layer_offloading import LayerOffloading, offload_loaded
from finetune.layers.lean_layers import lean_summary, make_lean, undo_lean


def lean(model: torch.nn.Module, *, enabled: bool = True) -> list[str]:
    """Let a model's layers save about half the bytes for the backward pass, with the same gradients up to rounding, in place.

    `model`: a transformers model or a PeftModel of one, with its adapters. `enabled=False` takes it back. Returns the lean
    parts of each decoder layer, in words. Raises RecipeError for a model without decoder layers.
    """
    layers = _decoder_layers(model)
    (make_lean if enabled else undo_lean)([*layers, *outside_layers(model)])
    return [lean_summary(layer) for layer in layers] if enabled else []


def offload_layers(model: torch.nn.Module, count: int | None = None) -> LayerOffloading:
    """Move the frozen weights of `count` decoder layers (all by default) to pinned host memory; two are on the GPU at a time.

    `model`: on its GPU, with its adapters. Every offloaded layer needs gradient checkpointing, on already or turned on by the
    trainer. Losses and gradients stay the same to the bit. Raises RecipeError for a model that it does not work with.
    """
    layers = _decoder_layers(model)
    if count is not None and not 0 < count <= len(layers):
        raise RecipeError(f"{count} layers can't be offloaded: the model has {len(layers)}", f"Give 1 to {len(layers)}.")
    device = next(model.parameters()).device
    if device.type == "cpu" and torch.cuda.is_available():
        raise RecipeError("the model is still on the CPU", "Move it to the GPU first: model.to('cuda').")
    return offload_loaded(model, count)


def _decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    layers = decoder_layers(model)
    if not layers:
        raise RecipeError(
            "the model has no decoder layers that transformers can checkpoint", "Give a transformers language model."
        )
    return layers
