"""What the planner suggests, searches and retries never breaks a rule of the recipe."""

import dataclasses

import pytest

from finetune.card import find_card
from finetune.plan.make import make_plan
from finetune.recipe import recipe_from, resolved
from finetune.run.retry import next_smaller

QWEN_8B = "Qwen/Qwen3-8B"
TWO = {"num_processes": 2}
RECIPES = {
    "a sharded model with a set optimizer": {
        "optim": "adamw_torch", "launch": {**TWO, "strategy": "fsdp"}, "max_length": 32768,
    },
    "ZeRO-3": {"launch": {**TWO, "strategy": "deepspeed", "zero_stage": 3}, "max_length": 32768, "load_in_4bit": True},
    "every second layer of a compiled model": {
        "torch_compile": True, "activation_checkpointing_every_n_layers": 2, "max_length": 32768,
    },
    "int8 weights": {"load_in_8bit": True, "max_length": 32768},
    "a model's own code": {"trust_remote_code": True, "model_revision": "a" * 40, "max_length": 65536},
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_does_not_fit_is_planned_and_retried_within_its_rules(new_forecaster, name):
    recipe = recipe_from({"model_name_or_path": QWEN_8B, "dataset": "rows.jsonl", **RECIPES[name]})
    plan = make_plan(recipe, find_card("rtx-3060"), None, forecaster=new_forecaster(), compare=True)
    assert plan.verdict != "fits"
    tried = 0
    while changes := next_smaller(plan, "train"):  # raises when a change is not allowed
        plan, tried = dataclasses.replace(plan, settings=resolved(plan.settings, **changes)), tried + 1
    assert tried < 20
