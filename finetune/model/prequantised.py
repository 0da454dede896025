"""Checkpoints that are stored quantised: in which formats they can be trained, and which model they were made from."""

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
    """The `quantization_config` in a config.json's content, with its `quant_method`; empty for a 16-bit model.

    bitsandbytes' first versions wrote no method. Raises RecipeError for another type.
    """
    own = values.get("quantization_config")
    if own is None or own == {}:
        return {}
    own = own.to_dict() if hasattr(own, "to_dict") else own
    if not isinstance(own, dict):
        raise RecipeError(
            f"model_name_or_path {name}: quantization_config in its config.json is {own!r}, not an object",
            "Give the model as it was published.",
        )
    method = own.get("quant_method")
    if method is None and (own.get("load_in_4bit") or own.get("load_in_8bit")):
        method = BITSANDBYTES
    return {**own, "quant_method": getattr(method, "value", method)}


def stored_format(own: dict[str, Any]) -> BaseFormat:
    """The format of a checkpoint that bitsandbytes stored."""
    return NF4 if own.get("load_in_4bit") else INT8


def stored_notes(own: dict[str, Any]) -> tuple[str, ...]:
    """Return notes on weights that bitsandbytes stored: its default, FP4, is trained without conversion."""
    if own.get("quant_method") != BITSANDBYTES or stored_format(own) is not NF4 or own.get("bnb_4bit_quant_type") == "nf4":
        return ()
    return ("the checkpoint's 4-bit weights are FP4: as many bytes as NF4's, but further from the 16-bit weights",)


def trainable_formats(own: dict[str, Any]) -> tuple[BaseFormat, ...]:
    """Formats that a checkpoint stored so can be trained in; empty when it is not quantised.

    bitsandbytes' are trained as stored. Others are dequantised while loading, and mxfp4 can be quantised again to NF4.
    """
    if not own:
        return ()
    if own["quant_method"] == BITSANDBYTES:
        return (stored_format(own),)
    return (BITS_16, NF4) if own["quant_method"] == "mxfp4" else (BITS_16,)


def original_of(recipe: Recipe) -> str:
    """The 16-bit model that a quantised one was made from, by name; in general words where nothing says it.

    The catalogue knows it by its name, or the checkpoint's README names it as `base_model`.
    """
    name = recipe.model_name_or_path
    original = _original(name) or _original(name.rstrip("/").rpartition("/")[2])
    base = original or card_value(recipe, "base_model", download=True) or ""
    # a copy of a quantised copy names that one
    return (_original(base) or base) if REPO_ID.fullmatch(base) and base != name else "the 16-bit model"


def _original(name: str) -> str | None:
    match = resolve(name)
    return match.name if match is not None and match.name != name else None
