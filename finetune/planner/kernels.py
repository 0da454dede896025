"""Packing of rows, the attention kernel, and whether decoder layers are compiled."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from finetune.card.card import Card
from finetune.errors import RecipeError
from finetune.model.configuration import default_attention
from finetune.planner.choices import AS_SET, Choices
from finetune.planner.plan import DataStatistics
from finetune.planner.speed import Job, time_step
from finetune.planner.strategy import Strategy
from finetune.settings import AUTO, resolved
from finetune.settings.base_formats import INT8
from finetune.settings.compatibility import compiling_conflict
from finetune.settings.methods import METHODS
from finetune.settings.optimizers import EIGHT_BIT, OPTIMIZERS

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

#: Seconds to compile a layer: 2 to 33 on a busy machine, once 112 (benchmarks/reference/compiled_matrix.csv).
COMPILE_S = 25.0
#: Model types whose compiled layers were run on a stand-in: one graph, and the forecast's bytes. phi3's forecast is 2 to 4 %
#: too high for rows of uneven length (benchmarks/reference/compiled_matrix.csv).
COMPILED_TYPES = (
    "exaone4", "gemma", "gemma3_text", "granite", "llama", "ministral3", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3",
)  # fmt: skip
#: Lowest compute capability for which torch's compiler has Triton kernels (torch/_inductor/scheduler.py).
LEAST_CAPABILITY = (7, 0)


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


def why_lean(
    job: Job, choices: Choices, config: dict[str, Any], steps_of: Callable[[int], int | None], strategy: Strategy
) -> str:
    """Return why a strategy's layers are not compiled; empty if compiling pays off."""
    recipe, card = choices.recipe, job.card
    if recipe.torch_compile != AUTO:
        return AS_SET
    if card.is_cpu:
        return "a processor computes most of a step in the same kernels"
    if strategy.base is INT8:
        return compiling_conflict(resolved(recipe, load_in_8bit=True))
    if strategy.offload_target:
        return "weights of layers that are moved have not been tried"
    if strategy.checkpointing == "offload" and strategy.every_n > 1:
        return "inputs of every layer or of none are offloaded"
    if recipe.lora_dropout and strategy.checkpointing:
        return "dropout in recomputed layers needs more than its forecast"
    if card.capability is not None and card.capability < LEAST_CAPABILITY:
        return f"Triton has no kernels for compute capability {card.capability[0]}.{card.capability[1]}"
    if recipe.lean_layers is True or recipe.mlp_tile_tokens not in (AUTO, 0):
        return "the recipe asks for lean layers"
    if recipe.launch.num_processes > 1:
        return "several processes have not been tried"
    if (kind := (config.get("text_config") or config).get("model_type")) not in COMPILED_TYPES:
        return f"layers of type {kind} have not been tried"
    if why := compiling_conflict(recipe):
        return why
    if OPTIMIZERS[strategy.optim].price > OPTIMIZERS[EIGHT_BIT].price and not choices.is_set("optim"):
        return f"{strategy.optim} is taken where memory is too short for it"
    # the number of steps depends on the micro-batch
    pays, reason = compiling_pays(job, strategy, steps_of(strategy.micro))
    return "" if pays else reason


def compiling_pays(job: Job, strategy: Strategy, steps: int | None) -> tuple[bool, str]:
    """Tell whether compiled layers save more time than compiling takes."""
    lean, compiled = (time_step(dataclasses.replace(job, compiled=on), strategy).step_s for on in (False, True))
    if compiled >= lean:
        return False, "by the model of a step it saves no time"
    needed = math.ceil(COMPILE_S / (lean - compiled))
    saved = f"by the model of a step it saves {1 - compiled / lean:.0%} of time; compiling takes about {COMPILE_S:.0f} s, which"
    if steps is not None and steps < needed:
        return False, f"{saved} pays off after {needed:,} steps, and the run has {steps:,}"
    return True, f"{saved} pays off after {needed:,} steps"
