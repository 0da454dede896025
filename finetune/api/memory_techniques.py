"""`lean`: a memory technique for a loaded model."""

from __future__ import annotations

import torch

from finetune.errors import RecipeError
from finetune.layers.checkpointing import decoder_layers, outside_layers
from finetune.layers.lean_layers import lean_summary, make_lean, undo_lean


def lean(model: torch.nn.Module, *, enabled: bool = True) -> list[str]:
    """Roughly halve the activations stored for the backward pass; gradients change only by rounding.

    Changes the model in place; `enabled=False` reverts that. Returns a summary of each decoder layer. Raises RecipeError
    for a model without decoder layers.
    """
    layers = decoder_layers(model)
    if not layers:
        raise RecipeError(
            "the model has no decoder layers that transformers can checkpoint", "Give a transformers language model."
        )
    (make_lean if enabled else undo_lean)([*layers, *outside_layers(model)])
    return [lean_summary(layer) for layer in layers] if enabled else []
