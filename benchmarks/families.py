"""Trains a small model of each family on the CPU, in 16 and in 4 bit, and compares its memory with the forecast.

    python benchmarks/families.py                  # every family: the worst phase of each, and the losses; minutes
    python benchmarks/families.py gemma3 qwen3_5   # only these
    python benchmarks/families.py --write          # also writes benchmarks/reference/families.csv

A family is a model type: each of the packaged catalogue, and others that people train. The models have random weights and the
traits of the real ones: layer patterns, soft caps, sinks, shared keys and values, experts, parts for images. The run is the
worker's own, with every storage tracked; the forecast is the dry run of the same plan. Needs no GPU and no network.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "memory"))  # real_run
TABLE = ROOT / "benchmarks" / "reference" / "families.csv"
BITS = (16, 4)
#: Tokens of the one row that is repeated; the phases of a run.
TOKENS = 128
PHASES = ("load", "forward", "loss", "loss backward", "backward", "optimizer", "save", "eval")

_SIZE = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 2048, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_WINDOW = {"sliding_window": 32, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_LINEAR = {
    "num_hidden_layers": 4, "head_dim": 32, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 16, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 32, "mamba_expand": 2}
_QWEN_VISION = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 256, "patch_size": 14,
    "num_position_embeddings": 16,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
_IDS = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
_MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4], "rope_theta": 1e4}}
_QWEN35_ROPE = {
    "rope_parameters": {
        "rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
    }
}  # fmt: skip


def _text(**values: Any) -> dict[str, Any]:
    return {"text_config": {**_SIZE, **values}}


#: Model type -> what its config.json has beside the sizes; with a `text_config` it is all that config.json has.
FAMILIES: dict[str, dict[str, Any]] = {
    # those of the catalogue
    "apertus": {},
    "cohere": {"logit_scale": 0.0625, "use_qk_norm": True},
    "cohere2": {**_WINDOW, "head_dim": 32, "logit_scale": 0.25},
    "ernie4_5": {"head_dim": 32, "tie_word_embeddings": True},
    "exaone4": {**_WINDOW, "head_dim": 32},
    "falcon": {"num_kv_heads": 1, "multi_query": True, "parallel_attn": True, "alibi": False, "num_key_value_heads": None},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 512, "head_dim": 32},
    "gemma": {"head_dim": 64, "num_key_value_heads": 1},
    "gemma2": {"head_dim": 64, "sliding_window": 32, "num_hidden_layers": 4},
    "gemma3": {"vision_config": _SIGLIP, "mm_tokens_per_image": 1, "image_token_index": 5, "boi_token_index": 6,
               "eoi_token_index": 7, **_text(**_WINDOW, head_dim=64)},
    "gemma3_text": {**_WINDOW, "head_dim": 64, "num_key_value_heads": 1},
    "gemma4": {
        "vision_config": {**_SIGLIP, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 64},
        "audio_config": None, "image_token_id": 5, "video_token_id": 6, "audio_token_id": 7, "boi_token_id": 8,
        **_text(
            num_hidden_layers=6, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            sliding_window=32, head_dim=32, global_head_dim=64, hidden_size_per_layer_input=32, vocab_size_per_layer_input=2048,
            num_kv_shared_layers=3, use_double_wide_mlp=True, num_key_value_heads=1, final_logit_softcapping=30.0,
        ),
    },
    "gemma4_unified": {
        "vision_config": None, "audio_config": None, "image_token_id": 5, "video_token_id": 6, "audio_token_id": 7,
        "boi_token_id": 8,
        **_text(**_WINDOW, head_dim=32, global_head_dim=64, num_global_key_value_heads=1, attention_k_eq_v=True,
                hidden_size_per_layer_input=0, num_kv_shared_layers=0, final_logit_softcapping=30.0),
    },
    "glm4_moe_lite": {
        "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_key_value_heads": 8},
    "gpt_oss": {**_WINDOW, "intermediate_size": 128, "head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2},
    "granite": {"attention_multiplier": 0.03, "embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.22},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "mamba", "attention"], "num_local_experts": 8,
                         "num_experts_per_tok": 2, "shared_intermediate_size": 128, "intermediate_size": 64},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**_EXPERTS, "layer_types": ["conv", "conv", "full_attention"], "num_dense_layers": 1},
    "llama": {"rope_parameters": {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128}},
    "mistral": {"sliding_window": 32},
    "mistral3": {
        "vision_config": {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
                          "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        "image_token_index": 5, "tie_word_embeddings": False, **_text(model_type="mistral", head_dim=32, sliding_window=None)},
    "mixtral": {"intermediate_size": 128, "num_local_experts": 8, "num_experts_per_tok": 2},
    "muse_glimmer": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
        "image_token_id": 5, "video_token_id": 6, "out_hidden_size": 128, "projector_hidden_size": 64,
        **_text(**_WINDOW, head_dim=32, num_key_value_heads=2)},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"], "num_hidden_layers": 4, "head_dim": 32,
        "mamba_num_heads": 16, "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 2, "chunk_size": 32,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 128,
    },
    "olmo2": {},
    "olmo3": {**_WINDOW},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": 32},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_5_vl": {"vision_config": {**_QWEN_VISION, "fullatt_block_indexes": [0]}, **_IDS, **_text(**_MROPE)},
    "qwen3": {"head_dim": 64, "tie_word_embeddings": True},
    "qwen3_5": {"vision_config": _QWEN_VISION, **_IDS, **_text(**_LINEAR, **_QWEN35_ROPE, tie_word_embeddings=True),
                "tie_word_embeddings": True},
    "qwen3_5_moe": {"vision_config": _QWEN_VISION, **_IDS,
                    **_text(**_LINEAR, **_QWEN35_ROPE, **_EXPERTS, shared_expert_intermediate_size=64)},
    "qwen3_moe": {"head_dim": 64, **_EXPERTS},
    "qwen3_next": {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 64},
    "qwen3_vl": {"vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]}, **_IDS, "tie_word_embeddings": True,
                 **_text(**_MROPE, head_dim=32, tie_word_embeddings=True)},
    "qwen3_vl_moe": {"vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": [0]}, **_IDS,
                     **_text(**_MROPE, **_EXPERTS, head_dim=32)},
    "seed_oss": {"head_dim": 32, "attention_dropout": 0.1, "residual_dropout": 0.1},
    "smollm3": {"no_rope_layer_interval": 2, "tie_word_embeddings": True},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
    "starcoder2": {"sliding_window": 32, "use_bias": True, "tie_word_embeddings": True},
    # others
    "deepseek_v3": {
        "q_lora_rank": 64, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_group": 2,
        "topk_group": 1, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "num_key_value_heads": 8},
    "glm4": {"head_dim": 32, "partial_rotary_factor": 0.5},
    "glm4_moe": {"head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                 "first_k_dense_replace": 1, "use_qk_norm": True},
    "gpt2": {"intermediate_size": None, "num_key_value_heads": None, "tie_word_embeddings": True},
    "gpt_neox": {"rotary_pct": 0.25},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 64},
    "qwen2_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
                  "shared_expert_intermediate_size": 128},
}  # fmt: skip


def config_values(family: str) -> dict[str, Any]:
    """The content of a small model's config.json."""
    traits = FAMILIES[family]
    values = {**({} if "text_config" in traits else _SIZE), **traits}
    return {"model_type": family, **{name: value for name, value in values.items() if value is not None}}


def save_model(family: str, folder: Path) -> str:
    """Save a small model of this family, with random weights and the bundled model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(0)
    values = config_values(family)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    whole = AutoModelForImageTextToText if "text_config" in values else AutoModelForCausalLM
    whole.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    bundled_tokenizer().save_pretrained(folder)
    return str(folder)


def bundled_tokenizer() -> Any:
    """The tokenizer of the bundled model: bytes and frequent pairs."""
    from transformers import AutoTokenizer

    from finetune.bundled import model_path

    return AutoTokenizer.from_pretrained(model_path("tiny"))


def trained(family: str, bits: int, folder: Path, **more: Any) -> tuple[dict[str, int], dict[str, int], list[float]]:
    """Peak bytes of each phase as forecast and as tracked, and the loss of each step, of three steps on one repeated row."""
    from real_run import forecast, measured, planned

    from finetune.events import read_events
    from finetune.model.configuration import default_attention

    row = folder / "row.jsonl"
    row.write_text(json.dumps({"text": _text_of(TOKENS - 1)}) + "\n", encoding="utf-8")
    run, plan = planned(
        save_model(family, folder / "model"), folder,
        **{
            "dataset": {"path": str(row), "eval_path": str(row)}, "load_in_4bit": bits == 4, "max_steps": 3, "save_steps": 3,
            "eval_steps": 3, "gradient_accumulation_steps": 1, "learning_rate": 3e-3, "lr_scheduler_type": "constant",
            "warmup_ratio": 0, "attn_implementation": default_attention(config_values(family)), **more,
        },
    )  # fmt: skip
    expected, seen = forecast(plan), measured(run)
    return expected, seen, [event.loss for event in read_events(run.events) if event.kind == "step"]


@cache
def _text_of(tokens: int) -> str:
    """A text of so many tokens; EOS comes after it."""
    tokenizer, text = bundled_tokenizer(), " ".join(map(str, range(tokens)))
    return next(text[:end] for end in range(tokens, len(text)) if len(tokenizer(text[:end]).input_ids) == tokens)


def row_of(family: str, bits: int) -> dict[str, str]:
    """Train one family: the loss before the first and after the last step, and the phase whose peak is furthest from its
    forecast, relative."""
    with tempfile.TemporaryDirectory() as folder:
        expected, seen, losses = trained(family, bits, Path(folder))
    errors = {phase: expected[phase] / seen[phase] - 1 for phase in PHASES}
    worst = max(errors, key=lambda phase: abs(errors[phase]))
    return {
        "family": family, "bits": str(bits), "first_loss": f"{losses[0]:.3f}", "last_loss": f"{losses[-1]:.3f}",
        "worst_phase": worst, "worst_error": f"{errors[worst]:.5f}",
    }  # fmt: skip


def table(path: Path = TABLE) -> list[dict[str, str]]:
    """A committed table."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_table(path: Path, rows: list[dict[str, str]]) -> None:
    """Write a committed table."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Print a line for each family and bits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("FINETUNE_CACHE", tempfile.mkdtemp())
    cases = [(family, bits) for family in options.families or sorted(FAMILIES) for bits in BITS]
    rows = []
    with ProcessPoolExecutor(2) as pool:
        for row in pool.map(row_of, *zip(*cases, strict=True)):
            rows.append(row)
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    if options.write:
        write_table(TABLE, rows)


if __name__ == "__main__":
    main()
