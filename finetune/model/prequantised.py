"""Checkpoints that are stored quantised, and their trainable formats."""

from __future__ import annotations

from typing import Any

from finetune.errors import RecipeError
from finetune.settings.base_formats import BITS_16, INT8, NF4, BaseFormat

BITSANDBYTES = "bitsandbytes"
#: Quantisation methods that transformers can undo while loading.
DEQUANTISED = ("mxfp4", "fp8")


def stored_quantisation(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return config.json's `quantization_config`; empty for a 16-bit model. Raises RecipeError if it is not an object."""
    stored = values.get("quantization_config")
    if stored is None or stored == {}:
        return {}
    stored = stored.to_dict() if hasattr(stored, "to_dict") else stored
    if not isinstance(stored, dict):
        raise RecipeError(
            f"model_name_or_path {name}: quantization_config in its config.json is {stored!r}, not an object",
            "Give the published model.",
        )
    method = stored.get("quant_method")
    # bitsandbytes' first versions wrote no method
    if method is None and (stored.get("load_in_4bit") or stored.get("load_in_8bit")):
        method = BITSANDBYTES
    return {**stored, "quant_method": getattr(method, "value", method)}


def stored_format(stored: dict[str, Any]) -> BaseFormat:
    """Return the format of a checkpoint that bitsandbytes stored."""
    return NF4 if stored.get("load_in_4bit") else INT8


def stored_notes(stored: dict[str, Any]) -> tuple[str, ...]:
    """Return notes on weights that bitsandbytes stored."""
    is_4bit = stored.get("quant_method") == BITSANDBYTES and stored_format(stored) is NF4
    if not is_4bit or stored.get("bnb_4bit_quant_type") == "nf4":
        return ()
    # FP4, bitsandbytes' default, is trained without conversion
    return ("the checkpoint's 4-bit weights are FP4: as many bytes as NF4's, but further from the 16-bit weights",)


def trainable_formats(stored: dict[str, Any]) -> tuple[BaseFormat, ...]:
    """Return the formats that a quantised checkpoint can be trained in; empty for 16 bit."""
    if not stored:
        return ()
    if stored["quant_method"] == BITSANDBYTES:
        return (stored_format(stored),)
    # dequantised while loading; mxfp4 can be quantised again to NF4
    return (BITS_16, NF4) if stored["quant_method"] == "mxfp4" else (BITS_16,)
