"""Small configurations of each model type, and resolved settings, for forecasts in a second."""

from typing import Any

from finetune.model.configuration import default_attention
from finetune.recipe import recipe_from
from finetune.settings import Settings, resolve_plain

TINY: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 1024, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
#: What each type needs beside these to be small.
TYPES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {}, "qwen2": {}, "qwen3": {"head_dim": 32}, "gemma2": {"head_dim": 32, "sliding_window": 128},
    "gemma3_text": {"head_dim": 32, "sliding_window": 128}, "phi3": {}, "olmo2": {}, "granite": {}, "falcon": {},
    "smollm3": {"no_rope_layer_interval": 2}, "gpt_neox": {}, "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32, "sliding_window": 128},
}  # fmt: skip


def config_values(kind: str = "llama", **more: Any) -> dict[str, Any]:
    return {"model_type": kind, **TINY, **TYPES[kind], **more}


def settings(kind: str = "llama", **more: Any) -> Settings:
    """Settings for a model of this kind: NF4, checkpointed, fused AdamW, one row at a time."""
    recipe = recipe_from(
        {
            "model_name_or_path": "some/model", "attn_implementation": default_attention(config_values(kind)),
            "dataset": "rows.jsonl", "dtype": "bfloat16", "load_in_4bit": True,
            "load_in_8bit": False, "lora_r": 8, "lora_alpha": 16, "target_modules": "all-linear", "packing": False,
            "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "gradient_accumulation_steps": 4,
            "optim": "adamw_torch_fused", "activation_checkpointing": True, "activation_checkpointing_every_n_layers": 1,
            "learning_rate": 1e-4, "max_length": 512, "eval_steps": 10, "save_steps": 10, **more,
        }
    )  # fmt: skip
    return resolve_plain(recipe)
