"""`lean` and `offload_layers`: memory techniques for a loaded model."""

from __future__ import annotations

import torch

from finetune.errors import RecipeError
from finetune.layers.checkpointing import decoder_layers, outside_layers
from finetune.layers.layer_offloading import LayerOffloading, offload_loaded
from finetune.layers.lean_layers import lean_summary, make_lean, undo_lean


def lean(model: torch.nn.Module, *, enabled: bool = True) -> list[str]:
    """Roughly halve the activations stored for the backward pass; gradients change only by rounding.

    Changes the model in place; `enabled=False` reverts that. Returns a summary of each decoder layer. Raises RecipeError
    for a model without decoder layers.
    """
    layers = _decoder_layers(model)
    (make_lean if enabled else undo_lean)([*layers, *outside_layers(model)])
    return [lean_summary(layer) for layer in layers] if enabled else []


def offload_layers(model: torch.nn.Module, count: int | None = None) -> LayerOffloading:
    """Offload the frozen weights of `count` decoder layers (default: all) to pinned host memory; losses stay bit-identical.

    The model is on the GPU with its adapters, and trains with gradient checkpointing. Raises RecipeError.
    """
    layers = _decoder_layers(model)
    if count is not None and not 0 < count <= len(layers):
        raise RecipeError(f"{count} layers can't be offloaded: the model has {len(layers)}", f"Give 1 to {len(layers)}.")
    device = next(model.parameters()).device
    if device.type == "cpu" and torch.cuda.is_available():
        raise RecipeError("the model is still on the CPU", "Move it to the GPU first: model.to('cuda').")
    return offload_loaded(model, count)  # keeps buffers of two layers on the GPU


def _decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    layers = decoder_layers(model)
    if not layers:
        raise RecipeError(
            "the model has no decoder layers that transformers can checkpoint", "Give a transformers language model."
        )
    return layers
