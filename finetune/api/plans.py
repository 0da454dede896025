"""`plan`: a run's settings for a GPU, each with its reason, and the forecast."""

from __future__ import annotations

from typing import Any

from finetune.card import find_card
from finetune.planner.plan import Plan, read_plan
from finetune.planner.planning import plan_recipe, read_rows, without_rows
from finetune.recipe import NO_DATASET, recipe_from

__all__ = ["plan", "read_plan"]


def plan(model: str, dataset: str | None = None, *, gpu: str = "auto", **settings: Any) -> Plan:
    """Plan the fastest run that fits: `finetune.plan("Qwen/Qwen3-8B", "rows.jsonl", gpu="rtx-4090", lora_r=16).settings`.

    `model`, `dataset`: hub names or paths. Without a dataset, rows have `max_length` tokens. Raises a FinetuneError.
    """
    recipe = recipe_from({"model_name_or_path": model, "dataset": {"path": dataset or NO_DATASET}, "gpu": gpu, **settings})
    return plan_recipe(recipe, find_card(gpu), without_rows if dataset is None else read_rows)
