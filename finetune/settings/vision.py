"""Settings of runs on rows with images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.settings.schema import Recipe

#: Width and height of each image of a row, in pixels.
Sizes = tuple[tuple[int, int], ...]
#: Setting -> its only value that was checked with images, and why other values are refused.
_ONLY: dict[str, tuple[Any, str]] = {
    "packing": (False, "a packed sequence does not say which picture belongs to which row"),
    "layer_offloading": (False, "layers are not offloaded beside a vision tower yet"),
    "offload_embeddings": (False, "the input embedding is not in host memory beside a vision tower yet"),
    "torch_compile": (False, "layers are not compiled beside a vision tower yet"),
    "int8_activations": (False, "saved activations of a vision tower are not stored as int8 yet"),
    "activation_offloading": (False, "saved activations of a vision tower are not offloaded yet"),
    "load_in_8bit": (False, "a vision tower in int8 has not been checked yet; use load_in_4bit, or neither"),
    "use_dora": (False, "DoRA has not been checked with pictures yet"),
    "precompute_ref_log_probs": (False, "only supervised fine-tuning reads pictures"),
    "new_tokens": ({}, "rows of the embedding are not trained beside a vision tower yet"),
    "trained_embedding_rows": ([], "rows of the embedding are not trained beside a vision tower yet"),
    "trust_remote_code": (False, "pictures go through transformers' own processors only"),
}


def with_vision(recipe: Recipe, *, has_pictures: bool) -> tuple[Recipe, dict[str, str]]:
    """Return the recipe for rows with images, if any, and a reason for each changed setting. Raises RecipeError."""
    from finetune.errors import RecipeError
    from finetune.settings import resolved

    if recipe.vision is False and has_pictures:
        raise RecipeError("the rows have pictures, and vision is false", "Set vision=auto, or leave the pictures out.")
    if not has_pictures and recipe.vision is not True and recipe.train_vision == "none":
        return recipe, {}
    if not has_pictures:
        setting = "vision is true" if recipe.vision is True else f"train_vision is {recipe.train_vision}"
        raise RecipeError(
            f"{setting}, and no row with a picture was read, so that what pictures need is not known",
            "Give rows with pictures that are on this machine, and the model's own processor beside its config.json.",
        )
    reasons = {name: reason for name, (_, reason) in _ONLY.items() if getattr(recipe, name) == "auto"}
    values: dict[str, Any] = {name: _ONLY[name][0] for name in reasons}
    if recipe.offloaded_layers == "auto":
        values["offloaded_layers"] = 0
    try:
        changed = resolved(recipe, vision=True, **values)
    except ValueError as error:
        raise RecipeError(str(error).splitlines(), "Leave these settings out, or leave the pictures out.") from None
    return changed, reasons | ({"vision": "the rows have pictures"} if recipe.vision == "auto" else {})


def pixel_limit(recipe: Recipe) -> int | None:
    """Return `max_pixels`, None without a limit or a plan."""
    return None if recipe.max_pixels == "auto" else recipe.max_pixels


def vision_problems(recipe: Recipe) -> Iterator[str]:
    """Yield settings that can't be combined with images, one line each."""
    if recipe.vision is False and recipe.train_vision != "none":
        yield f"train_vision {recipe.train_vision} needs the vision tower, and vision is false"
    if recipe.vision is not True:
        return
    for name, (value, reason) in _ONLY.items():
        if (own := getattr(recipe, name)) not in (value, "auto"):
            yield f"{name} {str(own).lower()} does not work with pictures: {reason}"
    if recipe.method not in ("sft", "auto"):
        yield f"method {recipe.method} does not work with pictures yet; use sft"
    if recipe.excess_length in ("truncate", "chunk"):
        yield f"excess_length {recipe.excess_length} does not work with pictures: it would cut their tokens; use drop"
    if recipe.launch.num_processes > 1 or recipe.launch.strategy != "ddp":
        yield "several processes do not work with pictures yet; set launch.num_processes=1 and launch.strategy=ddp"
