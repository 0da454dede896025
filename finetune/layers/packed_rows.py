"""Whether a model keeps the rows of a packed sequence apart; some model types let a row see the one before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel

from finetune.errors import RecipeError
from finetune.layers.experts import has_experts

#: Tokens of the row that changes, and of those after it: fewer than a convolution's taps, as many as a delta rule's chunk, and
#: a usual row.
_TOKENS, _LATER = 16, (1, 3, 64, 16)
#: Most that any token may change, relative. Both batches have the same shapes, so the same kernels run in the same order, and
#: what is masked adds exactly 0: a dense model gives 0 in 16 bit and with NF4 weights, too, on a GPU as on the CPU.
MOST_CHANGE = 1e-6
#: The same where tokens meet in more than attention, for the median of the first tokens after the row. A mixture's experts get
#: other numbers of rows, so 16-bit products round otherwise and a few tokens get other experts; int8 looks for outlier columns
#: in the whole batch. A toy model whose state leaked changed by 3.5 %.
MOST_SHARED_CHANGE = 0.02


def require_isolated_rows(model: PeftModel, collate: Callable[[Any], Any]) -> None:
    """Raise RecipeError where a packed row sees another row: attention masks or a layer's state cross its boundary.

    The base model is tried, without its adapters. `collate` is the run's own collator, which packs rows.
    """
    base: Any = model.get_base_model()
    with model.disable_adapter():
        changes = changes_with_other_row(base, collate)
    shared = has_experts(base.config.get_text_config(decoder=True)) or getattr(base, "is_loaded_in_8bit", False)
    change, most = (changes[:_TOKENS].median(), MOST_SHARED_CHANGE) if shared else (changes.max(), MOST_CHANGE)
    if not change.item() <= most:
        raise RecipeError(
            f"packing: a packed row sees the row before it in this {model.config.model_type} model "
            f"(its hidden states change by {change:.2g} of their size with that row)",
            "Set packing=false.",
        )


@torch.no_grad()
def changes_with_other_row(model: Any, collate: Callable[[Any], Any]) -> torch.Tensor:
    """Relative change of the last hidden states of all later tokens of a packed sequence with its first row."""
    was_training = model.training
    model.eval()
    try:
        states, others = (_later_rows(model, collate, first) for first in (9, 109))
    finally:
        model.train(was_training)
    return (states - others).norm(dim=-1) / others.norm(dim=-1)


def _later_rows(model: Any, collate: Callable[[Any], Any], first: int) -> torch.Tensor:
    table = model.get_input_embeddings().weight
    rows = [range(first, first + _TOKENS), *(range(59, 59 + tokens) for tokens in _LATER)]
    batch = collate([{"input_ids": [token % len(table) for token in row]} for row in rows])
    inputs = {name: value.to(table.device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    inputs.pop("labels")
    return model.base_model(**inputs, use_cache=False).last_hidden_state[0, _TOKENS:].float()
