"""`plan`: every setting of a run for a GPU, with its reason, and its forecast; the recipe's settings as keywords."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from finetune.card import find_card
from finetune.planner.plan import read_plan
from finetune.planner.planning import plan_recipe, read_rows, without_rows
from finetune.recipe.load import NO_DATASET, recipe_from

if TYPE_CHECKING:
    from finetune.planner.plan import Plan

__all__ = ["plan", "read_plan"]


def plan(model: str, dataset: str | None = None, *, gpu: str = "auto", **settings: Any) -> Plan:
    """The fastest plan that fits: `finetune.plan("Qwen/Qwen3-8B", "rows.jsonl", gpu="rtx-4090", lora_r=16).settings`.

    `model`: a name of the hub or a path; its configuration and tokenizer are read. `dataset`: a path or a name of
    the hub; without it, or where it is not here, rows are as long as max_length. `settings`: those of a recipe. As
    `finetune plan`, whose files `finetune.read_plan` reads. Raises a FinetuneError.
    """
    recipe = recipe_from({"model_name_or_path": model, "dataset": {"path": dataset or NO_DATASET}, "gpu": gpu, **settings})
    return plan_recipe(recipe, find_card(gpu), without_rows if dataset is None else read_rows)
