"""Whether a model keeps the rows of a packed sequence apart; some model types let a row see the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel

from finetune.errors import RecipeError

#: Tokens of each of the two rows that are tried.
_TOKENS = 16
#: Most that a row may change with the row before it, relative: what batches of other rows do to a mixture's matmuls in 16 bit.
MOST_CHANGE = 0.02


def require_isolated_rows(model: PeftModel, collate: Callable[[Any], Any]) -> None:
    """Raise RecipeError where a packed row sees another row: attention masks or a layer's state cross its boundary.

    The base model is tried, without its adapters. `collate` is the run's own collator, which packs rows.
    """
    with model.disable_adapter():
        change = change_with_other_row(model.get_base_model(), collate)
    if not change <= MOST_CHANGE:
        raise RecipeError(
            f"packing: a packed row sees the row before it in this {model.config.model_type} model "
            f"(its hidden states change by {change:.0%} with that row)",
            "Set packing=false.",
        )


@torch.no_grad()
def change_with_other_row(model: Any, collate: Callable[[Any], Any]) -> float:
    """How much a packed row's last hidden states change with the row before it: the median over its tokens, relative.

    The batches have the same shapes, so a model that keeps rows apart gives 0, but for the
    rounding of a mixture's experts.
    """
    was_training = model.training
    model.eval()
    try:
        states, others = (_second_row(model, collate, first) for first in (range(9, 9 + _TOKENS), range(109, 109 + _TOKENS)))
    finally:
        model.train(was_training)
    return ((states - others).norm(dim=-1) / others.norm(dim=-1)).median().item()


def _second_row(model: Any, collate: Callable[[Any], Any], first: range) -> torch.Tensor:
    vocabulary_size = model.get_input_embeddings().weight.shape[0]
    rows = [{"input_ids": [token % vocabulary_size for token in tokens]} for tokens in (first, range(59, 59 + _TOKENS))]
    batch = collate(rows)
    device = model.get_input_embeddings().weight.device
    inputs = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    inputs.pop("labels")
    return model.base_model(**inputs, use_cache=False).last_hidden_state[0, _TOKENS:].float()
