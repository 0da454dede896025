"""Dtype and quantisation of the base weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import BitsAndBytesConfig, PretrainedConfig
from transformers.utils.quantization_config import FineGrainedFP8Config, Mxfp4Config

from finetune.compat.transformers import packing_quantiser
from finetune.errors import RecipeError
from finetune.layers.experts import has_experts, pack_experts
from finetune.model.configuration import BITSANDBYTES, DEQUANTISED, stored_format, stored_quantisation
from finetune.model.hybrid import layers_kept_in_16_bit
from finetune.model.language_model import text_config
from finetune.settings import Settings
from finetune.settings.base_formats import INT8, NF4, base_format_of, requested_formats
from finetune.settings.compatibility import shards_weights


def model_dtype(settings: Settings) -> torch.dtype:
    """Return the recipe's dtype."""
    return getattr(torch, settings.dtype)


def quantization_config(settings: Settings, config: PretrainedConfig) -> Any:
    """Return transformers' `quantization_config`, or None if unquantised. Raises RecipeError for an untrainable checkpoint."""
    if stored := stored_quantisation(vars(config), settings.model_name_or_path):
        return _config_for_stored(settings, stored, has_experts=has_experts(text_config(config)))
    base_format = base_format_of(settings)
    if base_format not in (NF4, INT8):
        return None
    quantization = _nf4_config(settings) if base_format is NF4 else BitsAndBytesConfig(load_in_8bit=True)
    if names := layers_kept_in_16_bit(text_config(config).model_type):
        quantization.llm_int8_skip_modules = [*names, "lm_head"]  # bitsandbytes reads this setting for 4 bits, too
    return quantization


def _nf4_config(settings: Settings) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=model_dtype(settings),
        # FSDP2 and ZeRO-3 shard floating-point parameters only; 4-bit weights in uint8 stay unsharded or are misread
        # (https://github.com/huggingface/accelerate/issues/3983)
        bnb_4bit_quant_storage=model_dtype(settings) if shards_weights(settings.launch) else torch.uint8,
    )


def quantiser_of(settings: Settings, config: PretrainedConfig) -> type | None:
    """Return the quantiser class that packs experts, or None if experts stay 16-bit."""
    stored = stored_quantisation(vars(config), settings.model_name_or_path)
    # a checkpoint that bitsandbytes stored has separate experts; FSDP2 and ZeRO-3 shard floating-point parameters only
    is_excluded = stored.get("quant_method") == BITSANDBYTES or shards_weights(settings.launch)
    return packing_quantiser(pack_experts) if base_format_of(settings).experts and not is_excluded else None


def _config_for_stored(settings: Settings, stored: dict[str, Any], *, has_experts: bool) -> Any:
    name, method = settings.model_name_or_path, stored["quant_method"]
    if method == BITSANDBYTES:
        stored_in = stored_format(stored)
        bits = f"{stored_in.bits}bit"
        if base_format_of(settings) is not stored_in:
            raise RecipeError(
                f"model_name_or_path {name} is stored in {bits}",
                f"Set {stored_in.setting}=true, or give the 16-bit model.",
            )
        # transformers 5 fuses a mixture's experts into 3-D weights
        if has_experts:
            raise RecipeError(
                f"model_name_or_path {name} is a mixture stored in {bits} with separate experts; transformers 5 "
                "loads fused experts only",
                "Give the 16-bit model; load_in_4bit=true also quantises its experts while loading.",
            )
        if stored_in is NF4 and shards_weights(settings.launch) and stored.get("bnb_4bit_quant_storage", "uint8") == "uint8":
            raise RecipeError(
                f"model_name_or_path {name} is stored as 4-bit weights in uint8, which {settings.launch.strategy} can't shard",
                "Give the 16-bit model; load_in_4bit=true quantises it while loading, so that it can be sharded.",
            )
        arguments = {key: value for key, value in stored.items() if not key.startswith("_")}
        if stored_in is NF4:
            arguments["bnb_4bit_compute_dtype"] = model_dtype(settings)
        return BitsAndBytesConfig(**arguments)
    if method == "mxfp4" and base_format_of(settings) is NF4 and not shards_weights(settings.launch):
        return _nf4_config(settings)
    if method in DEQUANTISED and not requested_formats(settings):
        return (Mxfp4Config if method == "mxfp4" else FineGrainedFP8Config)(dequantize=True)
    quantisation = method or "an unknown quantisation"
    give = "Set load_in_4bit=false load_in_8bit=false to train it in 16 bit, or give" if method in DEQUANTISED else "Give"
    raise RecipeError(
        f"model_name_or_path {name} is stored as {quantisation}, which conflicts with this recipe's quantisation",
        f"{give} the 16-bit model; load_in_4bit=true quantises it while loading.",
    )
