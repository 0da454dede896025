"""The largest value of a setting that fits, beside a search by hand with the arithmetic forecast."""

import json

import pytest

from finetune.card import find_card
from finetune.cli.plan import show_plan
from finetune.errors import RecipeError
from finetune.model.names import entries
from finetune.planner.planner import make_plan, plan_if_fits
from finetune.planner.planning import plan_largest, without_rows
from finetune.recipe import recipe_from
from finetune.settings import resolved
from finetune.units import GIB

QWEN_8B = "Qwen/Qwen3-8B"


def recipe(**settings):
    return recipe_from({"model_name_or_path": QWEN_8B, "dataset": "rows.jsonl", "layer_offloading": False, **settings})


def by_hand(card, step, settings_of):
    """The first value of every `step` that does not fit."""
    value = step
    while make_plan(resolved(recipe(), **settings_of(value)), card, None).verdict.fits:
        value += step
    return value


@pytest.mark.parametrize(
    ("setting", "step", "settings_of"),
    [
        ("max_length", 256, lambda tokens: {"max_length": tokens}),
        pytest.param(
            "per_device_train_batch_size", 1,
            lambda rows: {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 1, "effective_batch_size": rows},
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_it_is_that_of_a_search_by_hand(setting, step, settings_of, arithmetic):
    card = find_card("rtx-4090", free_bytes=8 * GIB)
    largest = plan_largest(recipe(), card, without_rows, setting)
    assert largest.too_large == by_hand(card, step, settings_of)
    assert largest.value == largest.too_large - step and largest.plan.verdict.fits
    assert getattr(largest.plan.settings, setting) == largest.value


@pytest.mark.exhaustive
def test_with_layers_offloaded_the_next_value_does_not_fit():
    card, fixed = find_card("rtx-4090", free_bytes=6 * GIB), {"load_in_4bit": True, "lora_r": 8, "optim": "adamw_8bit"}
    open_recipe = recipe(layer_offloading="auto", activation_checkpointing=True, effective_batch_size=1, **fixed)
    largest = plan_largest(open_recipe, card, without_rows, "max_length")
    verdicts = [
        make_plan(resolved(open_recipe, max_length=tokens), card, None).verdict for tokens in (largest.value, largest.too_large)
    ]
    assert largest.plan.settings.layer_offloading and verdicts[0] == "fits, slow" and not verdicts[1].fits


def test_the_models_own_limit_is_the_answer_the_least_plan_says_why_none_fits_and_other_settings_are_refused(arithmetic):
    largest = plan_largest(recipe(), find_card("h200"), without_rows, "max_length")
    assert (largest.value, largest.too_large) == (40_960, None)
    assert largest.sentence == "max_length: 40,960 at most (the model's own limit)"
    largest = plan_largest(recipe(), find_card("rtx-4090", free_bytes=3 * GIB), without_rows, "lora_r")
    assert (largest.value, largest.too_large, largest.plan.verdict) == (0, 8, "does not fit")
    assert largest.sentence == "lora_r: 8 does not fit either"
    with pytest.raises(RecipeError, match="learning_rate: not searchable; choose max_length, lora_r, per_device"):
        plan_largest(recipe(), find_card("rtx-4090"), without_rows, "learning_rate")


@pytest.mark.slow
def test_the_largest_model_fits_and_no_larger_one_of_the_catalogue_does(arithmetic):
    card, short = find_card("rtx-4060"), recipe(max_length=1024)
    largest = plan_largest(short, card, without_rows, "model")
    assert largest.plan.verdict == "fits" and largest.overrides == (f"model_name_or_path={largest.value}",)
    sizes = {name: entry.parameters for name, entry in entries().items() if entry.first}
    larger = sorted((name for name in sizes if sizes[name] > sizes[largest.value]), key=sizes.get)
    assert largest.too_large in larger
    for other in larger[:2]:
        try:
            assert plan_if_fits(resolved(short, model_name_or_path=other), card, None) is None
        except RecipeError:  # the arithmetic can't plan it
            continue


@pytest.mark.slow
def test_the_command_prints_the_value_and_the_override_to_run_it_with(capsys):
    options = {"model": None, "data": None, "gpu": "rtx-3060", "free": "1", "largest": "per_device_train_batch_size"}
    assert show_plan("tiny-cpu", [], **options, as_json=True) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["too_large"] == answer["value"] + 1 and answer["plan"]["verdict"] == "fits"
    show_plan("tiny-cpu", [], **options, as_json=False)
    assert capsys.readouterr().out.strip().endswith(f"finetune run tiny-cpu {' '.join(answer['overrides'])} gpu=auto")
