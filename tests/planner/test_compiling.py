"""What a plan says of compiled layers, whose gain no card has shown: it says so, and leaves them to the recipe."""

import pytest

from finetune.card import find_card
from finetune.errors import RecipeError
from finetune.planner.planner import make_plan
from finetune.recipe import recipe_from

RECIPE = {"model_name_or_path": "Qwen/Qwen3-8B", "dataset": "rows.jsonl", "max_length": 2048}


@pytest.fixture
def planned(new_forecaster):
    return lambda gpu="rtx-4090", **more: make_plan(
        recipe_from({**RECIPE, **more}), find_card(gpu), None, forecaster=new_forecaster()
    )


def test_a_long_run_shows_when_compiling_pays_off_and_keeps_its_settings(planned):
    plan, short = planned(max_steps=5000), planned(max_steps=20)
    assert plan.settings.torch_compile is False and "torch_compile" not in short.reasons
    reason = plan.reasons["torch_compile"]
    assert "not measured on a card" in reason and "of 5,000; torch_compile=true tries it" in reason
    assert plan.settings == short.settings.model_copy(
        update={name: getattr(plan.settings, name) for name in ("max_steps", "eval_steps", "save_steps", "output_dir")}
    )


@pytest.mark.slow
@pytest.mark.parametrize("more", [{"gpu": "cpu"}, {"int8_activations": True}, {}], ids=["cpu", "int8", "unknown steps"])
def test_nothing_is_reported_where_it_can_not_help(planned, more):
    steps = {"max_steps": 5000} if more else {}
    assert "torch_compile" not in planned(**{**steps, **more}).reasons


def test_a_recipe_that_compiles_shows_after_how_many_steps_it_pays_off(planned):
    reason = planned(torch_compile=True, max_steps=300).reasons["torch_compile"]
    assert reason.startswith("as the recipe sets it; by the model of a step, not measured on a card: saves at most")
    assert "pays off after about" in reason and reason.endswith("steps of 300")


def test_a_budget_is_of_compiled_layers():
    with pytest.raises(
        RecipeError, match="compile_activation_budget 0.8 applies only to compiled layers; set torch_compile to true"
    ):
        recipe_from({**RECIPE, "compile_activation_budget": 0.8})
