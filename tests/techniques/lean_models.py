"""Tiny models of each family with adapters, and gradients of one step with lean layers and without."""

import copy
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from tiny_training import settings_for
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from finetune.layers.checkpointing import decoder_layers
from finetune.layers.lean_layers import make_lean, undo_lean
from finetune.model.adapters import attach_adapters, prepare_for_training

ALL = "1 RoPE, 4 linear layers, 1 MLP, 2 norms"
#: Each family: what its configuration needs beside the common part, and what of a decoder layer is lean.
FAMILIES: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({}, ALL), "mistral": ({}, ALL), "qwen2": ({}, ALL), "gemma": ({}, ALL), "granite": ({}, ALL),
    "smollm3": ({}, ALL), "qwen3": ({}, "1 RoPE, 4 linear layers, 4 norms, 1 MLP"),
    "olmo2": ({}, "1 RoPE, 4 linear layers, 4 norms, 1 MLP"), "gemma2": ({}, "1 RoPE, 4 linear layers, 1 MLP, 4 norms"),
    "gemma3_text": ({}, "1 RoPE, 4 linear layers, 6 norms, 1 MLP"),
    "glm4": ({}, "4 linear layers, 1 MLP, 4 norms"), "phi3": ({}, "1 RoPE, 2 linear layers, 1 MLP, 2 norms"),
    "qwen3_5_text": (
        {"layer_types": ["linear_attention"] * 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
         "linear_key_head_dim": 16, "linear_value_head_dim": 24}, "1 short convolution, 3 norms, 5 linear layers, 1 MLP",
    ),
    "gpt_neox": ({}, "1 RoPE, 4 linear layers (as before: 2 LayerNorm)"),
    "qwen3_moe": (
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        "1 RoPE, 4 linear layers, 4 norms (as before: 2 adapter on Qwen3MoeExperts, 1 adapter on Qwen3MoeTopKRouter)",
    ),
}  # fmt: skip
COMMON = {
    "hidden_size": 64, "intermediate_size": 224, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 128, "max_position_embeddings": 128, "head_dim": 16, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def base_of(family: str, seed: int = 0) -> Any:
    """In fp32, with values that 16 bit has, and norm weights other than 1."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**COMMON, **FAMILIES[family][0])
    base = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    base.requires_grad_(False)
    base.config.use_cache = False
    for name, parameter in base.named_parameters():
        if "norm" in name:
            parameter.add_(0.3 * torch.randn_like(parameter))
        parameter.copy_(parameter.bfloat16())
    return base


def save_base(folder: Path, family: str) -> str:
    if not folder.exists():
        base_of(family).save_pretrained(folder)
    return str(folder)


def model_of(family: str, seed: int = 0, **changes: Any) -> Any:
    """A base with adapters other than 0."""
    base = base_of(family, seed)
    wanted = settings_for("none", **{"lora_alpha": 12.0, **changes})
    model = attach_adapters(base, wanted)
    fill_adapters(model)
    prepare_for_training(model, wanted)
    return model


def fill_adapters(model: torch.nn.Module) -> None:
    """Give lora_B values other than 0, so that all of an adapter gets gradients."""
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05, generator=torch.Generator().manual_seed(len(name)))


def cast(model: torch.nn.Module, dtype: torch.dtype) -> Any:
    """A copy with base weights of `dtype` and fp32 adapters; in fp64 all of it, with 4-bit weights dequantised."""
    other = copy.deepcopy(model)
    undo_lean(decoder_layers(other))
    for module in list(other.modules()):
        base = getattr(module, "base_layer", None)
        if isinstance(base, Linear4bit):
            plain = torch.nn.Linear(base.in_features, base.out_features, bias=False)
            plain.weight = torch.nn.Parameter(dequantize_4bit(base.weight.data, base.weight.quant_state), requires_grad=False)
            module.base_layer = plain
    for parameter in other.parameters():
        if not parameter.requires_grad or dtype == torch.float64:
            parameter.data = parameter.data.to(dtype)
    return other


def tokens(seed: int = 0, rows: int = 2, length: int = 48) -> torch.Tensor:
    return torch.randint(1, 128, (rows, length), generator=torch.Generator().manual_seed(seed))


def gradients(model: Any, ids: torch.Tensor, dtype: torch.dtype = torch.float32, lean: bool | None = None) -> torch.Tensor:
    """Gradients of all adapters, flat, in fp64; autocast for 16 bit. `lean` None: as the model is."""
    if lean is not None:
        (make_lean if lean else undo_lean)(decoder_layers(model))
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype in (torch.bfloat16, torch.float16)):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return adapter_gradients(model)


def adapter_gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.requires_grad])


def error(values: torch.Tensor, reference: torch.Tensor) -> float:
    return ((values - reference).norm() / reference.norm()).item()
