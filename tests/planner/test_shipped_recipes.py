"""Every shipped recipe loads, names a model and a card we know, says how to run it, and is forecast to fit its card."""

import pytest

from finetune.card import catalogue as cards
from finetune.card import find_card
from finetune.model.names import catalogue as models
from finetune.planner.planner import make_plan
from finetune.recipe import load_recipe, shipped_recipes

ONE_IN_FOUR = [pytest.mark.slow, *[pytest.mark.exhaustive] * 3]
FOR_A_CARD = sorted(name for name in shipped_recipes() if load_recipe(name).gpu in cards())


@pytest.mark.slow
def test_there_is_a_recipe_for_8_12_16_and_24_gb_cards():
    sizes = {round(find_card(load_recipe(name).gpu).total_bytes / 2**30 / 0.966) for name in FOR_A_CARD}
    assert {8, 12, 16, 24} <= sizes and "7b-4090" in FOR_A_CARD and len(FOR_A_CARD) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("name", FOR_A_CARD)
def test_a_recipe_names_a_known_model_and_says_how_to_run_it(name):
    assert load_recipe(name).model_name_or_path in models()
    header = shipped_recipes()[name].read_text(encoding="utf-8").splitlines()[:3]
    assert header[0].startswith("# ") and f"finetune plan {name}" in header[1] and f"finetune run {name}" in header[2]


@pytest.mark.parametrize("name", [pytest.param(name, marks=ONE_IN_FOUR[at % 4]) for at, name in enumerate(FOR_A_CARD, 3)])
def test_a_recipe_is_forecast_to_fit_its_card(name):
    recipe = load_recipe(name)
    plan = make_plan(recipe, find_card(recipe.gpu), None)
    assert plan.verdict.fits and plan.headroom_bytes >= 0
    assert plan.settings.max_length == recipe.max_length
