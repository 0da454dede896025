"""Check that a model keeps the examples of a packed sequence apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel

from finetune.errors import RecipeError
from finetune.layers.experts import has_experts

#: Tokens of the example that changes, and of the later examples: 1 and 3 are fewer than a convolution's taps, 64 is a delta
#: rule's chunk, 16 a usual example.
_CHANGED_TOKENS, _LATER_TOKENS = 16, (1, 3, 64, 16)
#: Largest relative change of any token. Both batches have the same shapes, so the same kernels run in the same order, and
#: masked tokens add exactly 0: a dense model changes by 0, also in 16 bit or with NF4 weights, on a GPU or a CPU.
MAX_CHANGE = 1e-6
#: Largest median change of the first tokens after the changed example, where examples of a batch affect each other slightly
#: in any case: a mixture's experts get other numbers of rows, so 16-bit products round otherwise and a few tokens get other
#: experts; int8 looks for outlier columns in the whole batch. A toy model whose state leaked changed by 3.5 %.
MAX_MEDIAN_CHANGE = 0.02


def require_isolated_examples(model: PeftModel, collate: Callable[[Any], Any]) -> None:
    """Raise RecipeError where a packed example sees another example. `collate`: the run's packing collator."""
    base: Any = model.get_base_model()
    # attention masks or a layer's state may cross the boundary in the base model
    with model.disable_adapter():
        changes = changes_with_other_example(base, collate)
    if has_experts(base.config.get_text_config(decoder=True)) or getattr(base, "is_loaded_in_8bit", False):
        change, limit = changes[:_CHANGED_TOKENS].median(), MAX_MEDIAN_CHANGE
    else:
        change, limit = changes.max(), MAX_CHANGE
    if not change.item() <= limit:  # NaN, too
        raise RecipeError(
            f"packing: a packed example depends on the example before it in this {model.config.model_type} model "
            f"(hidden states change by {change:.2g} of their size)",
            "Set packing=false.",
        )


@torch.no_grad()
def changes_with_other_example(model: Any, collate: Callable[[Any], Any]) -> torch.Tensor:
    """Return the relative change of all later tokens' last hidden states when the first example changes."""
    was_training = model.training
    model.eval()
    try:
        states, others = (_later_states(model, collate, first_id) for first_id in (9, 109))
    finally:
        model.train(was_training)
    return (states - others).norm(dim=-1) / others.norm(dim=-1)


def _later_states(model: Any, collate: Callable[[Any], Any], first_id: int) -> torch.Tensor:
    table = model.get_input_embeddings().weight
    # any token ids will do
    examples = [range(first_id, first_id + _CHANGED_TOKENS), *(range(59, 59 + tokens) for tokens in _LATER_TOKENS)]
    batch = collate([{"input_ids": [token % len(table) for token in example]} for example in examples])
    inputs = {name: value.to(table.device) if isinstance(value, torch.Tensor) else value for name, value in batch.items()}
    inputs.pop("labels")
    return model.base_model(**inputs, use_cache=False).last_hidden_state[0, _CHANGED_TOKENS:].float()
