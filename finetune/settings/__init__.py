"""The settings of a recipe; `finetune.recipe` reads files."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError, model_validator

from finetune.settings.base_formats import BITS_16, switches
from finetune.settings.schema import AUTO, DatasetRecipe, LaunchRecipe, Recipe, unresolved

__all__ = ["AUTO", "DatasetRecipe", "LaunchRecipe", "Recipe", "Settings", "resolve", "resolve_plain", "resolved", "unresolved"]

R = TypeVar("R", bound=Recipe)
#: A value for each `auto` setting where the planned value makes no difference, such as for a model's size.
PLAIN_VALUES: dict[str, Any] = {
    "method": "sft", "vision": False, "max_pixels": None,
    "dtype": "bfloat16", "attn_implementation": "sdpa", "max_length": 2048, "packing": False, **switches(BITS_16),
    "lora_r": 1, "lora_alpha": 1.0,
    "target_modules": "all-linear", "learning_rate": 1e-4, "optim": "adamw_torch", "activation_checkpointing": False,
    "activation_checkpointing_every_n_layers": 1, "lean_layers": False, "mlp_tile_tokens": 0, "offload_embeddings": False,
    "torch_compile": False, "layer_offloading": False,
    "gpu": "any", "memory_budget": "1GiB", "output_dir": "runs/unnamed",
    "eval_steps": 0, "save_steps": 0, "sample_answers": 0,
}  # fmt: skip


class Settings(Recipe):
    """Raises ValueError when a setting is still `auto`."""

    @model_validator(mode="after")
    def _is_resolved(self) -> Settings:
        unresolved_names = unresolved(self)
        if unresolved_names:
            raise ValueError(f"still auto: {', '.join(unresolved_names)}")
        return self


def resolved(recipe: R, **choices: Any) -> R:
    """Return a copy with `choices` filled in. Raises ValueError with a line per conflict."""
    return resolve(type(recipe), recipe, choices)


def resolve(kind: type[R], recipe: Recipe, choices: dict[str, Any]) -> R:
    """Return a recipe or settings with `choices` filled in. Raises ValueError for conflicts, Settings also for `auto`."""
    try:
        return kind.model_validate({**recipe.model_dump(exclude_unset=True), **choices})
    except ValidationError as error:
        # the setting's name, except for a conflict of several settings
        lines = (": ".join([*map(str, item["loc"]), item["msg"].removeprefix("Value error, ")]) for item in error.errors())
        raise ValueError("\n".join(lines)) from None


def resolve_plain(recipe: Recipe, **choices: Any) -> Settings:
    """Resolve every `auto` to a plain value; `choices` take precedence."""
    auto_names = unresolved(recipe)
    least_rows = recipe.training_method.min_rows
    layers = 0 if recipe.layer_offloading in (AUTO, False) else 1
    plain_values = {**PLAIN_VALUES, "per_device_eval_batch_size": least_rows, "offloaded_layers": layers}
    values = {name: value for name, value in plain_values.items() if name in auto_names}
    micro_batch, steps = recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps
    batch, world_size = recipe.effective_batch_size, recipe.launch.num_processes
    if "effective_batch_size" in auto_names:
        micro_batch = least_rows if micro_batch == AUTO else micro_batch
        steps = 1 if steps == AUTO else steps
        batch = micro_batch * steps * world_size
    elif "per_device_train_batch_size" in auto_names:
        steps = batch // (world_size * least_rows) if "gradient_accumulation_steps" in auto_names else steps
        micro_batch = batch // (world_size * steps)
    else:
        steps = batch // (world_size * micro_batch)
    values |= {"per_device_train_batch_size": micro_batch, "gradient_accumulation_steps": steps}
    return resolve(Settings, recipe, {**values, "effective_batch_size": batch, **choices})
