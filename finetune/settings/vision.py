"""Settings of runs on rows with images."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.settings.schema import Recipe

#: Width and height of each image of a row, in pixels.
Sizes = tuple[tuple[int, int], ...]
#: Setting -> its only value that was checked with images, and why other values are refused.
ONLY_WITH_VISION: dict[str, tuple[Any, str]] = {
    "packing": (False, "a packed sequence does not record which image belongs to which row"),
    "layer_offloading": (False, "layers are not offloaded with a vision tower yet"),
    "offload_embeddings": (False, "the input embedding is not offloaded with a vision tower yet"),
    "torch_compile": (False, "layers are not compiled with a vision tower yet"),
    "load_in_8bit": (False, "int8 is untested with a vision tower; use load_in_4bit, or neither"),
    "use_dora": (False, "DoRA is untested with images"),
    "new_tokens": ({}, "embedding rows are not trained with a vision tower yet"),
    "trained_embedding_rows": ([], "embedding rows are not trained with a vision tower yet"),
    "trust_remote_code": (False, "images are read by transformers' own processors only"),
}


def pixel_limit(recipe: Recipe) -> int | None:
    """Return `max_pixels`, None without a limit or a plan."""
    return None if recipe.max_pixels == "auto" else recipe.max_pixels


def vision_problems(recipe: Recipe) -> Iterator[str]:
    """Yield settings that can't be combined with images, one line each."""
    if recipe.vision is False and recipe.train_vision != "none":
        yield f"train_vision {recipe.train_vision} needs the vision tower, and vision is false"
    if recipe.vision is not True:
        return
    for name, (value, reason) in ONLY_WITH_VISION.items():
        if (recipe_value := getattr(recipe, name)) not in (value, "auto"):
            yield f"{name} {str(recipe_value).lower()} does not work with images: {reason}"
    if recipe.method not in ("sft", "auto"):
        yield f"method {recipe.method} does not work with images yet; use sft"
    if recipe.excess_length in ("truncate", "chunk"):
        yield f"excess_length {recipe.excess_length} does not work with images: it would cut image tokens; use drop"
    if recipe.launch.num_processes > 1 or recipe.launch.strategy != "ddp":
        yield "several processes do not work with images yet; set launch.num_processes=1 and launch.strategy=ddp"
