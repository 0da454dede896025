"""When a plan compiles the layers, and what it says of that."""

import dataclasses

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


def test_layers_are_compiled_where_that_pays_off_and_a_short_run_keeps_lean_ones(planned):
    plan, short = planned(max_steps=5000), planned(max_steps=5)
    assert plan.settings.torch_compile and not plan.settings.lean_layers and "compiled" in plan.reasons["lean_layers"]
    assert "pays off after" in plan.reasons["torch_compile"]
    assert not short.settings.torch_compile and short.settings.lean_layers
    assert short.reasons["torch_compile"].endswith("steps, and the run has 5")
    assert planned().settings.torch_compile  # steps are not known


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"gpu": "cpu"}, "a processor computes most of a step in the same kernels"),
        ({"int8_activations": True}, "what a compiled layer saves can't be quantised"),
        ({"load_in_8bit": True}, "load_in_8bit, at whose products the graphs break"),
        ({"use_dora": True}, "use_dora, at whose norms the graphs break"),
        ({"layer_offloading": "cpu"}, "weights of layers that are moved have not been tried"),
        ({"lora_dropout": 0.05, "activation_checkpointing": True}, "dropout in recomputed layers needs more than its forecast"),
        ({"lean_layers": True}, "the recipe asks for lean layers"),
        ({"torch_compile": False}, "as the recipe sets it"),
        ({"launch": {"num_processes": 2}}, "several processes have not been tried"),
        ({"model_name_or_path": "Qwen/Qwen3-30B-A3B", "gpu": "rtx-5090"}, "layers of type qwen3_moe have not been tried"),
    ],
)  # fmt: skip
def test_lean_layers_stay_with_the_reason_where_compiled_ones_can_not_be(planned, more, why):
    plan = planned(max_steps=5000, **more)
    assert not plan.settings.torch_compile and plan.reasons["torch_compile"].endswith(why)


def test_compiled_layers_that_do_not_fit_are_left_out(new_forecaster, monkeypatch):
    forecaster = new_forecaster()

    def forecast(config, settings, card, **more):
        dry_run = forecaster(config, settings, card, **more)
        return dataclasses.replace(dry_run, peak_high_bytes=dry_run.peak_high_bytes + settings.torch_compile * 2**40)

    plan = make_plan(recipe_from({**RECIPE, "max_steps": 5000}), find_card("rtx-4090"), None, forecaster=forecast)
    assert not plan.settings.torch_compile and plan.reasons["torch_compile"].endswith("more than there is")


@pytest.mark.parametrize(
    "more",
    [{"load_in_8bit": True}, {"use_dora": True}, {"int8_activations": True}, {"model_name_or_path": "Qwen/Qwen3-30B-A3B"}],
)
def test_a_recipe_can_not_compile_what_breaks_graphs(planned, more):
    with pytest.raises(RecipeError, match="torch_compile does not work with .*; set torch_compile to auto or false"):
        planned(torch_compile=True, **more)
