"""When a plan compiles the layers, makes them lean or computes them in tiles, and what it says of that."""

import dataclasses

import pytest

from finetune.card import find_card
from finetune.errors import RecipeError
from finetune.planner.planner import make_plan
from finetune.recipe import recipe_from

RECIPE = {"model_name_or_path": "Qwen/Qwen3-8B", "dataset": "rows.jsonl", "max_length": 2048}


@pytest.fixture
def planned(arithmetic):
    return lambda gpu="rtx-4090", **more: make_plan(recipe_from({**RECIPE, **more}), find_card(gpu), None)


def test_layers_are_compiled_where_that_pays_off_and_fits_and_a_short_run_keeps_lean_ones(planned, arithmetic, forecast_by):
    plan, short = planned(max_steps=5000), planned(max_steps=5)
    assert plan.settings.torch_compile and not plan.settings.lean_layers and "compiled" in plan.reasons["lean_layers"]
    assert "pays off after" in plan.reasons["torch_compile"]
    assert not short.settings.torch_compile and short.settings.lean_layers
    assert short.reasons["torch_compile"].endswith("steps, and the run has 5")
    assert planned().settings.torch_compile  # steps are not known

    def forecast(config, settings, card, **more):
        dry_run = arithmetic(config, settings, card, **more)
        return dataclasses.replace(dry_run, peak_high_bytes=dry_run.peak_high_bytes + settings.torch_compile * 2**40)

    forecast_by(forecast)
    plan = planned(max_steps=5000)
    assert not plan.settings.torch_compile and plan.reasons["torch_compile"].endswith("more than the budget")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"gpu": "cpu"}, "on a CPU compiled layers run mostly the same kernels"),
        ({"load_in_8bit": True}, "load_in_8bit: int8 products break the graph"),
        ({"use_dora": True}, "use_dora: DoRA's norms break the graph"),
        ({"layer_offloading": "cpu"}, "offloaded layers are untested"),
        ({"lora_dropout": 0.05, "activation_checkpointing": True}, "layers with dropout need more than their forecast"),
        ({"lean_layers": True}, "the recipe sets lean layers"),
        ({"torch_compile": False}, "as the recipe sets it"),
        ({"launch": {"num_processes": 2}}, "several processes are untested"),
        ({"model_name_or_path": "Qwen/Qwen3-30B-A3B", "gpu": "rtx-5090"}, "layers of type qwen3_moe are untested"),
    ],
)  # fmt: skip
def test_lean_layers_stay_with_the_reason_where_compiled_ones_can_not_be(planned, more, why):
    plan = planned(max_steps=5000, **more)
    assert not plan.settings.torch_compile and plan.reasons["torch_compile"].endswith(why)


@pytest.mark.parametrize("more", [{"load_in_8bit": True}, {"use_dora": True}, {"model_name_or_path": "Qwen/Qwen3-30B-A3B"}])
def test_a_recipe_can_not_compile_what_breaks_graphs(planned, more):
    with pytest.raises(RecipeError, match="torch_compile does not work with .*; set torch_compile to auto or false"):
        planned(torch_compile=True, **more)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("torch_compile", {"torch_compile": True}), ("use_dora", {"use_dora": True}),
        ("lora_dropout", {"lora_dropout": 0.1, "torch_compile": False}),
        ("ZeRO-3", {"launch": {"num_processes": 2, "strategy": "deepspeed", "zero_stage": 3}}),
    ],
)  # fmt: skip
def test_lean_layers_are_off_where_they_do_not_work_with_the_reason(planned, name, more):
    plan = planned(**more)
    assert plan.settings.lean_layers is False and name in plan.reasons["lean_layers"]
    with pytest.raises(RecipeError, match=f"lean_layers does not work with .*{name}"):
        recipe_from({**RECIPE, **more, "lean_layers": True})


@pytest.mark.parametrize(
    ("more", "tile"),
    [({"max_length": 8192}, 0), ({"max_length": 8193}, 4096), ({"max_length": 8193, "lora_dropout": 0.1}, 0)],
)
def test_long_rows_of_lean_layers_have_tiles(planned, more, tile):
    assert planned(torch_compile=False, **more).settings.mlp_tile_tokens == tile
    with pytest.raises(RecipeError, match="mlp_tile_tokens needs lean layers, which do not work with lora_dropout"):
        recipe_from({**RECIPE, "mlp_tile_tokens": 64, "lora_dropout": 0.1})
