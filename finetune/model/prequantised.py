"""Checkpoints that are stored quantised, and their trainable formats."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.errors import RecipeError
from finetune.hub import REPO_ID
from finetune.model.configuration import card_value
from finetune.model.names import resolve
from finetune.settings.base_formats import BITS_16, INT8, NF4, BaseFormat

if TYPE_CHECKING:
    from finetune.settings import Recipe

BITSANDBYTES = "bitsandbytes"
#: Methods that transformers can undo while loading.
DEQUANTISED = ("mxfp4", "fp8")


def stored_quantisation(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return config.json's `quantization_config`; empty for a 16-bit model. Raises RecipeError if it is not an object."""
    own = values.get("quantization_config")
    if own is None or own == {}:
        return {}
    own = own.to_dict() if hasattr(own, "to_dict") else own
    if not isinstance(own, dict):
        raise RecipeError(
            f"model_name_or_path {name}: quantization_config in its config.json is {own!r}, not an object",
            "Give the published model.",
        )
    method = own.get("quant_method")
    # bitsandbytes' first versions wrote no method
    if method is None and (own.get("load_in_4bit") or own.get("load_in_8bit")):
        method = BITSANDBYTES
    return {**own, "quant_method": getattr(method, "value", method)}


def stored_format(own: dict[str, Any]) -> BaseFormat:
    """Return the format of a checkpoint that bitsandbytes stored."""
    return NF4 if own.get("load_in_4bit") else INT8


def stored_notes(own: dict[str, Any]) -> tuple[str, ...]:
    """Return notes on weights that bitsandbytes stored."""
    if own.get("quant_method") != BITSANDBYTES or stored_format(own) is not NF4 or own.get("bnb_4bit_quant_type") == "nf4":
        return ()
    # FP4, bitsandbytes' default, is trained without conversion
    return ("the checkpoint's 4-bit weights are FP4: as many bytes as NF4's, but further from the 16-bit weights",)


def trainable_formats(own: dict[str, Any]) -> tuple[BaseFormat, ...]:
    """Return the formats that a checkpoint can be trained in; empty when it is not quantised."""
    if not own:
        return ()
    if own["quant_method"] == BITSANDBYTES:
        return (stored_format(own),)
    # dequantised while loading; mxfp4 can be quantised again to NF4
    return (BITS_16, NF4) if own["quant_method"] == "mxfp4" else (BITS_16,)


def original_of(recipe: Recipe) -> str:
    """Return the 16-bit model behind a quantised checkpoint, in general words when unknown."""
    name = recipe.model_name_or_path
    # the catalogue knows it by its name, or the checkpoint's README names it
    original = _original(name) or _original(name.rstrip("/").rpartition("/")[2])
    base = original or card_value(recipe, "base_model", download=True) or ""
    # a copy of a quantised copy names the quantised copy
    return (_original(base) or base) if REPO_ID.fullmatch(base) and base != name else "the 16-bit model"


def _original(name: str) -> str | None:
    match = resolve(name)
    return match.name if match is not None and match.name != name else None
