"""Whether right-padded batches need an attention mask, and whether packed examples stay apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.masking_utils import sdpa_mask

from finetune.compat.torch import fake_tensor_mode
from finetune.compat.transformers import fake_experts
from finetune.compat.trl import add_loss
from finetune.errors import RecipeError
from finetune.layers.experts import has_experts
from finetune.model.build import build_on_meta

_NAME = "padding_probe"
_EXAMPLES, _TOKENS = 2, 8
#: Results of `needs_padding_mask` by configuration: a search simulates the same model many times.
_RESULTS: dict[str, bool] = {}


# In causal attention no token sees later tokens, so the mask of right padding changes no real token. Without a mask torch can
# use flash attention, and allocates no mask of tokens x tokens for each example.
def needs_padding_mask(config: PretrainedConfig) -> bool:
    """Return whether the mask of a right-padded batch may change the loss of its real tokens."""
    key = json.dumps(config.to_dict(), sort_keys=True, default=str)
    if key not in _RESULTS:
        _RESULTS[key] = _reads_mask(config)
    return _RESULTS[key]


def without_mask(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch without attention masks."""
    return {name: value for name, value in batch.items() if not name.endswith("attention_mask")}


def _reads_mask(config: PretrainedConfig) -> bool:
    AttentionInterface.register(_NAME, _no_attention)
    AttentionMaskInterface.register(_NAME, _causal_mask)
    # Only transformers' causal masks can read this mask. With any other reader a batch needs its mask: positions counted from
    # the mask, a state or convolution that skips padding, the balance loss of a mixture's router.
    mask = torch.ones(_EXAMPLES, _TOKENS, dtype=torch.long).as_subclass(_UnreadMask)
    try:
        model: Any = build_on_meta(config, None, dtype=torch.bfloat16, attention=_NAME)
        add_loss(model.train())
        with fake_experts(), fake_tensor_mode(), torch.no_grad():
            model.to_empty(device="cpu")
            ids = torch.zeros(_EXAMPLES, _TOKENS, dtype=torch.long)
            model(input_ids=ids, labels=ids, attention_mask=mask, use_cache=False, fused_lm_head=True)
    except Exception:  # noqa: BLE001 - code of hundreds of model types
        return True  # also for a model that can't be tried
    # a mask that did not reach the attention may be needed elsewhere
    return not mask.reached_attention


class _UnreadMask(Tensor):
    """A mask that raises an error when its values are read."""

    reached_attention = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            return args[0]  # still an `_UnreadMask`
        if func in (Tensor.dim, Tensor.size) or func.__name__ == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})
        raise RuntimeError(f"{func.__name__} reads the attention mask")


def _causal_mask(
    batch_size: int, q_length: int, kv_length: int, *, attention_mask: Any = None, device: Any = None,
    allow_is_causal_skip: bool = True, **arguments: Any,
) -> None:  # fmt: skip
    """Mark a mask that has arrived unread. Raises ValueError for attention to later tokens."""
    with unset_fake_temporarily():
        mask = sdpa_mask(batch_size, q_length, kv_length, attention_mask=None, allow_is_causal_skip=False, **arguments)
        if mask is None or mask.triu(1).any():
            raise ValueError("attention is not causal")
    if isinstance(attention_mask, _UnreadMask):
        attention_mask.reached_attention = True


def _no_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any = None,
    **arguments: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    batch, heads, tokens, _ = query.shape
    return query.new_empty(batch, tokens, heads, value.shape[-1]), None


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
def changes_with_other_example(model: Any, collate: Callable[[Any], Any]) -> Tensor:
    """Return the relative change of all later tokens' last hidden states when the first example changes."""
    was_training = model.training
    model.eval()
    try:
        states, others = (_later_states(model, collate, first_id) for first_id in (9, 109))
    finally:
        model.train(was_training)
    return (states - others).norm(dim=-1) / others.norm(dim=-1)


def _later_states(model: Any, collate: Callable[[Any], Any], first_id: int) -> Tensor:
    table = model.get_input_embeddings().weight
    # any token ids will do
    examples = [range(first_id, first_id + _CHANGED_TOKENS), *(range(59, 59 + tokens) for tokens in _LATER_TOKENS)]
    batch = collate([{"input_ids": [token % len(table) for token in example]} for example in examples])
    inputs = {name: value.to(table.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
    inputs.pop("labels")
    return model.base_model(**inputs, use_cache=False).last_hidden_state[0, _CHANGED_TOKENS:].float()
