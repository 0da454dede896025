"""Packing of rows into sequences, and the attention kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.errors import RecipeError
from finetune.model.configuration import default_attention
from finetune.settings.methods import METHODS

if TYPE_CHECKING:
    from finetune.card.card import Card
    from finetune.planner.choices import Choices
    from finetune.planner.plan import DataStatistics


#: Length in tokens of a packed sequence when the recipe doesn't say.
PACKED_LENGTH = 2048
#: Packing pays when at least this many rows fit into a sequence.
ROWS_PER_SEQUENCE = 2.0
VARLEN = "torch_varlen"
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
#: Model types whose packed rows have, with VARLEN, the same hidden states as single rows. Some missing types attend across rows
#: or keep a state from row to row (bloom, doge, falcon, jamba, minimax), the rest have not been tried.
KEPT_APART = {
    "afmoe", "apertus", "arcee", "aria", "aria_text", "biogpt", "bitnet", "cohere", "cohere2", "cwm", "deepseek_v3",
    "diffllama", "ernie4_5", "ernie4_5_moe", "exaone4", "flex_olmo", "fuyu", "gemma", "gemma3", "gemma3_text", "gemma4",
    "gemma4_text", "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "gpt-sw3", "gpt2", "gpt_bigcode",
    "gpt_neox", "granite", "granitemoe", "granitemoeshared", "helium", "hrm_text", "hy_v3", "hyperclovax", "idefics2",
    "idefics3", "internlm3", "internvl", "iquestcoder", "jais2", "llama", "minicpm3", "minimax_m2", "ministral3", "mistral",
    "mistral3", "mixtral", "modernbert-decoder", "nanochat", "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi",
    "phi3", "phimoe", "qwen2", "qwen2_5_vl", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe", "seed_oss",
    "smollm3", "smolvlm", "solar_open", "stablelm", "starcoder2",
}  # fmt: skip
#: Model types whose code passes its delta rule `cu_seq_lens_q`, a keyword that fla's `chunk_kda` lacks (transformers 5.21 to
#: 5.24): with fla and causal-conv1d a packed row silently gets the state of the previous row.
DROPS_BOUNDARIES = {"kimi_linear", "bailing_hybrid", "glm5_next"}


def choose_packing(
    choices: Choices, card: Card, config: dict[str, Any], data: DataStatistics | None, unpacked: bool, stateful: int
) -> Choices:
    """Resolve packing and attn_implementation. Raises RecipeError."""
    kind = str(config.get("model_type"))
    state = f"{stateful} layers of this {kind} model pass a state from one packed row to the next" if stateful else None
    if kind in DROPS_BOUNDARIES:
        state = f"transformers' code of {kind} models drops the boundaries of packed rows, so each row sees those before it"
    if state and choices.recipe.packing is True:
        raise RecipeError(f"packing: {state}", "Set packing=false.")
    # `unpacked`: an earlier attempt found that packed sequences don't fit
    problem = state or _varlen_conflict(config)
    packed, why = _packing(choices, card, problem, data)
    if packed and unpacked:
        packed, why = False, "packed sequences do not fit on this card; single rows do"
    choices = choices.choose("packing", packed, why)
    if choices.value("packing") and problem is None:
        return choices.choose("attn_implementation", VARLEN, "torch's varlen kernel: each packed row attends only to itself")
    attention = default_attention(config)
    dense = f"; packed rows need a dense mask: {problem}" if choices.value("packing") else ""
    kernels = "torch's own kernels, nothing to install" if attention == "sdpa" else "the only one this model supports"
    return choices.choose("attn_implementation", attention, f"{kernels}{dense}")


def _packing(choices: Choices, card: Card, problem: str | None, data: DataStatistics | None) -> tuple[bool, str]:
    if not METHODS[choices.recipe.method].packs:
        return False, f"method {choices.recipe.method} does not pack its rows"
    if card.is_cpu or card.capability is None or card.capability < (8, 0):
        return False, "torch's varlen attention needs an NVIDIA card of compute capability 8.0 or higher"
    if problem:
        return False, f"torch's varlen attention can't be used: {problem}"
    if choices.is_set("attn_implementation") and choices.recipe.attn_implementation != VARLEN:
        return False, f"packing with attn_implementation {choices.recipe.attn_implementation} would need a dense mask"
    if any(map(choices.is_set, ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"))):
        return False, "packing would change the rows per step, which the recipe sets"
    if data is None or not data.lengths:
        return False, "the rows have not been read"
    length = choices.recipe.max_length if choices.is_set("max_length") else max(PACKED_LENGTH, data.lengths[-1])
    rows = length * len(data.lengths) / data.total_tokens
    if rows < ROWS_PER_SEQUENCE:
        return False, f"rows are long: only {rows:.1f} fit into {length:,} tokens"
    return True, f"rows are short: about {rows:.1f} fit into {length:,} tokens, without padding"


def _varlen_conflict(config: dict[str, Any]) -> str | None:
    text = config.get("text_config") or config
    heads = text.get("num_attention_heads") or text.get("n_head") or 1
    head = text.get("head_dim") or (text.get("hidden_size") or text.get("n_embd") or 8 * heads) // heads
    if text.get("attn_logit_softcapping"):
        return "the model uses attention softcapping"
    if text.get("attention_dropout"):
        return "the model has attention dropout"
    if not set(text.get("layer_types") or ()) <= _ATTENTION_LAYERS:
        return "the model has other layers than full and sliding-window attention"
    if config.get("model_type") not in KEPT_APART:
        return f"it is not known to keep the rows of {config.get('model_type')} models apart"
    if head > 256 or head % 8:
        return f"its head dimension is {head}; the kernel takes multiples of 8 up to 256"
    return None
