"""Choose the settings that don't depend on memory."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from finetune.card.card import Card
from finetune.errors import RecipeError
from finetune.model.configuration import default_attention
from finetune.planner.plan import LEAST_LENGTH, Choices, DataStatistics
from finetune.planner.shape import ModelShape
from finetune.planner.speed import Batches
from finetune.recipe import write_recipe
from finetune.settings import AUTO, Recipe
from finetune.settings.compatibility import lean_layers_conflict
from finetune.settings.methods import METHODS
from finetune.settings.optimizers import FUSED, OPTIMIZERS
from finetune.units import format_count

#: Rows per optimizer step when the recipe doesn't say.
USUAL_BATCH = 16
#: max_length is a multiple of this.
LENGTH_STEP = 64
#: max_length when neither the recipe nor the data gives one.
USUAL_LENGTH = 2048
#: Text tokens assumed beside the images of a row, when the rows have not been read.
TEXT_TOKENS_BESIDE_IMAGES = 512
#: Tokens per MLP tile; rows of up to two tiles are computed without tiles.
TILE_TOKENS, MOST_UNTILED_TOKENS = 4096, 8192
#: Approximate number of evaluations in a run, and of checkpoints.
EVALUATIONS = 10
#: Model types (also `<type>_text`) whose activations or gradients exceed float16's 65,504, each with its source.
EXCEEDS_FLOAT16 = {
    **dict.fromkeys(("gemma2", "glm4"), "vllm/config/model.py refuses it"),
    "gemma3": "huggingface/transformers#39972",
    "gpt_oss": "microsoft/onnxruntime-genai#2444",
    **dict.fromkeys(("gemma4", "gemma4_unified", "glm4_moe", "glm4_moe_lite", "qwen3_moe"), "unslothai/unsloth-zoo#866"),
    **dict.fromkeys(("gemma3n", "qwen3_5", "qwen3_5_moe"), "FORCE_FLOAT32 in unsloth_zoo/model_lists.py, August 2026"),
}

#: Length in tokens of a packed sequence when the recipe doesn't say.
PACKED_LENGTH = 2048
#: Packing pays off when at least this many rows fit into a sequence.
LEAST_ROWS_PER_SEQUENCE = 2.0
VARLEN = "torch_varlen"
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
#: Model types whose packed rows have, with VARLEN, the same hidden states as single rows. Of the other types, bloom, doge,
#: falcon, jamba and minimax attend across rows or pass on a state; the rest have not been tried.
SEPARATES_PACKED_ROWS = {
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
#: "LoRA Without Regret" (Schulman and Thinking Machines Lab, 2025): rate = 5e-5 x 10 x (2000 / hidden)^power, by family.
BASE_RATE, LORA_FACTOR, HIDDEN_UNIT = 5e-5, 10.0, 2000
FAMILY_POWER = {"llama": 0.781, "qwen2": 0.0775, "qwen3": 0.0775}
#: QLoRA (Dettmers et al., 2023), table of hyperparameters: 2e-4 for 7B and 13B, 1e-4 for 33B and 65B.
QLORA_RATE, QLORA_LARGE_RATE, QLORA_LARGE = 2e-4, 1e-4, 20e9
RANKS = (16, 32, 64, 128, 256)
#: Bits that an adapter parameter can store, and bits of information in a trained token ("LoRA Without Regret").
BITS_PER_PARAMETER, BITS_PER_TOKEN = 2.0, 1.0


def choose_basics(choices: Choices, card: Card, config: dict[str, Any], shape: ModelShape, avoid_packing: bool) -> Choices:
    """Resolve every setting that does not depend on memory."""
    choices = choices.choose("dtype", *_advise_dtype(card, config)).choose("vision", False, "no row has an image")
    pixels_reason = "images keep their size" if choices.value("vision") else "no row has an image"
    choices = choices.choose("max_pixels", None, pixels_reason)
    choices = choose_packing(choices, card, config, avoid_packing, shape.stateful)
    why = "adapters on every linear layer, MLP included, learn best (LoRA Without Regret)"
    if shape.targets != "all-linear":
        why = f"attention only: all-linear would add an adapter to each of {shape.experts} experts per layer"
    choices = choices.choose("target_modules", shape.targets, why).choose("lora_r", *advise_rank(shape, choices.data))
    choices = choices.choose("lora_alpha", *advise_alpha(choices.recipe, choices.value("lora_r")))
    method, optim = choices.recipe.method, choices.recipe.optim
    choices = choices.choose("learning_rate", *advise_learning_rate(shape, method, FUSED if optim == AUTO else optim))
    choices = _choose_length(choices, shape)
    choices = choices.choose("effective_batch_size", *_advise_batch_size(choices))
    conflict = lean_layers_conflict(choices.recipe)
    benefit = "about half the saved activations, for the same computation up to rounding"
    choices = choices.choose("lean_layers", not conflict, f"not with {conflict}" if conflict else benefit)
    choices = choices.choose("mlp_tile_tokens", *_advise_tile(choices))
    # the planner forecasts compiled layers later, once a strategy fits without them
    choices = choices.choose("torch_compile", False, "not tried")
    # the card's reason also where the recipe sets `gpu`
    choices = choices.choose("gpu", card.name, card.reason).with_reason("gpu", card.reason)
    model_name = choices.recipe.model_name_or_path.rstrip("/").rpartition("/")[2]
    folder_name = re.sub(r"[^A-Za-z0-9._-]+", "-", model_name).strip("-.") or "model"
    # a digest and no date: the same recipe gives the same plan
    digest = hashlib.sha256(json.dumps(write_recipe(choices.recipe)).encode()).hexdigest()[:8]
    why = "model name and digest of the recipe, and a number if that exists"
    return choices.choose("output_dir", f"runs/{folder_name}-{digest}", why)


def choose_packing(choices: Choices, card: Card, config: dict[str, Any], avoid_packing: bool, stateful_layers: int) -> Choices:
    """Resolve packing and attn_implementation. Raises RecipeError."""
    kind = str(config.get("model_type"))
    leak = None  # why a row would depend on the rows packed before it
    if kind in DROPS_BOUNDARIES:
        leak = f"transformers' code of {kind} models drops the boundaries of packed rows, so each row sees those before it"
    elif stateful_layers:
        leak = f"{stateful_layers} layers of this {kind} model pass a state from one packed row to the next"
    if leak and choices.recipe.packing is True:
        raise RecipeError(f"packing: {leak}", "Set packing=false.")
    problem = leak or _varlen_conflict(config)
    packs, why = _advise_packing(choices, card, problem)
    if packs and avoid_packing:
        packs, why = False, "packed sequences do not fit on this GPU; single rows do"
    choices = choices.choose("packing", packs, why)
    if choices.value("packing") and problem is None:
        return choices.choose("attn_implementation", VARLEN, "torch's varlen kernel: each packed row attends only to itself")
    attention = default_attention(config)
    why = "torch's own kernels, nothing to install" if attention == "sdpa" else "the only one this model supports"
    if choices.value("packing"):
        why += f"; packed rows need a dense mask: {problem}"
    return choices.choose("attn_implementation", attention, why)


def _advise_packing(choices: Choices, card: Card, problem: str | None) -> tuple[bool, str]:
    if not choices.recipe.training_method.packs:
        return False, f"method {choices.recipe.method} does not pack its rows"
    if card.is_cpu or card.capability is None or card.capability < (8, 0):
        return False, "torch's varlen attention needs an NVIDIA GPU of compute capability 8.0 or higher"
    if problem:
        return False, f"torch's varlen attention can't be used: {problem}"
    if choices.is_set("attn_implementation") and choices.recipe.attn_implementation != VARLEN:
        return False, f"packing with attn_implementation {choices.recipe.attn_implementation} would need a dense mask"
    if any(map(choices.is_set, ("effective_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps"))):
        return False, "packing would change the rows per step set in the recipe"
    if (data := choices.data) is None or not data.lengths:
        return False, "the rows have not been read"
    length = choices.recipe.max_length if choices.is_set("max_length") else max(PACKED_LENGTH, data.lengths[-1])
    rows = length * len(data.lengths) / data.total_tokens
    if rows < LEAST_ROWS_PER_SEQUENCE:
        return False, f"rows are long: only {rows:.1f} fit into {length:,} tokens"
    return True, f"rows are short: about {rows:.1f} fit into {length:,} tokens, without padding"


def _varlen_conflict(config: dict[str, Any]) -> str | None:
    text_config = config.get("text_config") or config
    heads = text_config.get("num_attention_heads") or text_config.get("n_head") or 1
    hidden = text_config.get("hidden_size") or text_config.get("n_embd") or 8 * heads
    head_dim = text_config.get("head_dim") or hidden // heads
    if text_config.get("attn_logit_softcapping"):
        return "the model uses attention softcapping"
    if text_config.get("attention_dropout"):
        return "the model has attention dropout"
    if not set(text_config.get("layer_types") or ()) <= _ATTENTION_LAYERS:
        return "the model has layers other than full and sliding-window attention"
    if config.get("model_type") not in SEPARATES_PACKED_ROWS:
        return f"varlen attention is not known to keep rows of {config.get('model_type')} models apart"
    if head_dim > 256 or head_dim % 8:
        return f"the model's head dimension is {head_dim}; the kernel takes multiples of 8 up to 256"
    return None


def _advise_dtype(card: Card, config: dict[str, Any]) -> tuple[str, str]:
    if card.is_cpu:
        return "float32", "16-bit arithmetic is slow or missing on most CPUs"
    if card.supports_bf16:
        return "bfloat16", "half the bytes of float32 with the same range; native on this GPU"
    generation = "this GPU" if card.capability is None else f"compute capability {card.capability[0]}.{card.capability[1]}"
    is_exceeded, why = float16_risk(config)
    if is_exceeded:
        return "float32", f"{generation} has no bfloat16; not float16, as {why}. Slower: float32 has no tensor cores"
    return "float16", f"{generation} has no bfloat16"


def float16_risk(config: dict[str, Any]) -> tuple[bool, str]:
    """Return whether the model is known to exceed float16's range, and the risk."""
    configs = (config, config.get("text_config") or {})
    for part in configs:
        if source := EXCEEDS_FLOAT16.get(str(part.get("model_type")).removesuffix("_text")):
            return True, f"{part['model_type']} exceeds its range ({source})"
    dtypes = {part.get(key) for part in configs for key in ("dtype", "torch_dtype")} - {None}
    # the catalogue's configurations name no dtype: they count as bfloat16
    return False, "models published in bfloat16 may exceed its range" if dtypes <= {"bfloat16"} else ""


def _advise_tile(choices: Choices) -> tuple[int, str]:
    if not choices.value("lean_layers"):
        return 0, "only lean layers have them"
    longest = Batches(choices.value("max_length"), choices.value("packing"), choices.data).longest
    if longest <= MOST_UNTILED_TOKENS:
        return 0, f"only rows of more than {MOST_UNTILED_TOKENS:,} tokens need tiles"
    return TILE_TOKENS, f"rows of {longest:,} tokens: recomputed layers keep only one MLP tile"


def advise_rank(shape: ModelShape, data: DataStatistics | None) -> tuple[int, str]:
    """Return the smallest rank with adapter capacity for the trained tokens."""
    if data is None or shape.adapter_per_rank == 0:
        return RANKS[0], "quality hardly depends on rank when every layer has an adapter (QLoRA)"
    needed = data.trained_tokens * BITS_PER_TOKEN / BITS_PER_PARAMETER
    rank = next((rank for rank in RANKS if rank * shape.adapter_per_rank >= needed), RANKS[-1])
    parameters = rank * shape.adapter_per_rank
    enough = "enough" if parameters >= needed else "too few"
    return rank, (
        f"{format_count(parameters)} adapter parameters at 2 bits each are {enough} for {format_count(data.trained_tokens)} "
        "trained tokens at 1 bit each (LoRA Without Regret)"
    )


def advise_alpha(recipe: Recipe, rank: int) -> tuple[float, str]:
    """Return alpha 32, or with rsLoRA the same scale at rank 16."""
    if recipe.use_rslora:
        return 8.0, "scale 8 / sqrt(r): one learning rate for every rank (rsLoRA); at rank 16 the scale of plain alpha 32"
    return 32.0, f"scale 32 / {rank}: with a fixed alpha the best learning rate hardly depends on rank (LoRA Without Regret)"


def advise_learning_rate(shape: ModelShape, method: str = "sft", optim: str = FUSED) -> tuple[float, str]:
    """Return the rate for this method and optimizer, to two significant digits."""
    power = FAMILY_POWER.get(shape.family)
    if power is None:  # the paper did not fit this family
        rate = QLORA_RATE if shape.parameters < QLORA_LARGE else QLORA_LARGE_RATE
        why = f"{rate:.0e} for {shape.billions} (QLoRA's table: 2e-4 up to 13B, 1e-4 from 33B)".replace("e-0", "e-")
    else:
        rate = _two_digits(BASE_RATE * LORA_FACTOR * (HIDDEN_UNIT / shape.hidden) ** power)
        formula = f"5e-5 x 10 x (2000 / {shape.hidden})^{power} for {shape.family} (LoRA Without Regret)"
        why = f"10 x full fine-tuning's rate: {formula}"
    # the rates above are for SFT with AdamW
    if METHODS[method].rate_source:
        why = f"{METHODS[method].rate_factor:g} x SFT's rate ({METHODS[method].rate_source}); SFT's: {why}"
    if OPTIMIZERS[optim].rate_source:
        why = f"{OPTIMIZERS[optim].rate_factor:g} x AdamW's rate ({OPTIMIZERS[optim].rate_source}); {why}"
    return _two_digits(rate * (METHODS[method].rate_factor * OPTIMIZERS[optim].rate_factor)), why


def _two_digits(value: float) -> float:
    return round(value, 1 - math.floor(math.log10(value)))


def _choose_length(choices: Choices, shape: ModelShape) -> Choices:
    limit, data = shape.max_positions or math.inf, choices.data
    if data is not None and data.longest:
        length = max(data.longest, min(_rounded_up(data.longest), limit), 8)  # 8: the schema's minimum
        if choices.value("packing"):
            length = max(length, min(PACKED_LENGTH, limit))
        why = f"the longest row has {data.longest:,} tokens; no row is truncated"
    else:
        image_row_tokens = sum(data.picture_tokens) + TEXT_TOKENS_BESIDE_IMAGES if data is not None else 0
        wanted = max(USUAL_LENGTH, _rounded_up(image_row_tokens))
        length = min(wanted, limit)
        why = "the images and their text" if wanted > USUAL_LENGTH else "the default length"
        why = "the model's limit" if length < wanted else why
        why += "; rows have not been read, so all are assumed this long"
    choices = choices.choose("max_length", length, why)
    if choices.value("max_length") > limit:
        above = f"; above the {limit:,} positions the model was trained for"
        choices = choices.with_reason("max_length", choices.reasons["max_length"] + above)
    return choices


def _rounded_up(tokens: int) -> int:
    return math.ceil(tokens / LENGTH_STEP) * LENGTH_STEP


def _advise_batch_size(choices: Choices) -> tuple[int, str]:
    recipe, data = choices.recipe, choices.data
    set_factors = [size for size in (recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps) if size != AUTO]
    # the effective batch must be a multiple
    unit = recipe.launch.num_processes * math.prod(set_factors)
    if len(set_factors) == 2:
        return unit, "per_device_train_batch_size x gradient_accumulation_steps x processes, as the recipe sets them"
    if data is not None and 0 < data.rows < USUAL_BATCH:
        power_of_two = 2 ** int(math.log2(data.rows))
        why = f"only {data.rows} rows, fewer than the default batch of {USUAL_BATCH}"
        return math.ceil(power_of_two / unit) * unit, why
    if choices.value("packing") and data is not None:
        rows = max(1.0, choices.value("max_length") * data.rows / data.total_tokens)
        batch = math.ceil(max(1, round(USUAL_BATCH / rows)) / unit) * unit
        return batch, f"packed sequences of about {rows:.0f} rows: about {round(batch * rows)} rows per step"
    why = "16, as in QLoRA; much larger batches hurt LoRA (LoRA Without Regret)"
    return math.ceil(USUAL_BATCH / unit) * unit, why


def choose_cadence(choices: Choices, steps: int | None) -> Choices:
    """Resolve eval_steps and save_steps. Raises RecipeError."""
    every = max(1, math.ceil(steps / EVALUATIONS)) if steps else 100
    why = f"about {EVALUATIONS} times in {steps:,} steps" if steps else "every 100 steps until the number of rows is known"
    may_evaluate = (data := choices.data) is None or not data.rows or data.eval_rows > 0
    if choices.recipe.early_stopping_patience and not may_evaluate:
        fix = "Set dataset.eval_path=FILE or dataset.test_split_size=0.1."
        raise RecipeError("early_stopping_patience needs held-out rows", fix)
    choices = choices.choose("eval_steps", *((every, why) if may_evaluate else (0, "no held-out rows")))
    return choices.choose("save_steps", every, why)


def with_shorter_lengths(choices: Choices) -> Iterator[Choices]:
    """Yield the choices, then shorter max_lengths unless the recipe sets it or known long rows are errors."""
    yield choices
    longest: int = choices.value("max_length")
    data = choices.data
    lengths = data.lengths if data else ()
    if choices.is_set("max_length") or (lengths and choices.recipe.excess_length == "raise"):
        return
    least = LEAST_LENGTH + (sum(data.picture_tokens) if data else 0)
    for length in (longest // 2, longest // 4, longest // 8):
        if length < least:
            return
        cost = "longer rows are dropped or truncated"
        if lengths:
            excess = [row_tokens - length for row_tokens in lengths if row_tokens > length]
            cost = f"{len(excess):,} rows are longer, by {sum(excess):,} tokens in all"
        yield choices.choose("max_length", length, f"rows of {longest:,} tokens do not fit on this GPU; {cost}")
