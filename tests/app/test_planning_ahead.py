"""The planner works ahead of the sliders while nobody asks, and drops it at once when somebody does."""

from app.ahead import Ahead, neighbours
from finetune.recipe import load_recipe, resolved

RECIPE = load_recipe("tiny-cpu")
SETTINGS = resolved(RECIPE, gradient_accumulation_steps=1)


def test_neighbours_differ_in_one_setting_nearest_first_and_are_recipes():
    found = list(neighbours(RECIPE, SETTINGS))
    names = ("lora_r", "max_length", "effective_batch_size")
    changed = [[name for name in names if getattr(recipe, name) != getattr(SETTINGS, name)] for recipe in found]
    assert all(len(names) == 1 for names in changed)
    assert [recipe.lora_r for recipe in found if recipe.lora_r != 16] == [8, 32, 64, 128, 256]
    assert all(recipe.effective_batch_size % 8 == 0 for recipe in found)  # the recipe sets 8 rows at once


def test_a_question_ends_the_work_between_two_forecasts_and_the_rest_is_dropped():
    planned, asked = [], []

    def make_plan(recipe, progress):
        progress("forecasting")
        planned.append(recipe)
        if len(planned) == 2:
            asked.append(True)
        progress("forecasting more")

    ahead = Ahead(make_plan, lambda: bool(asked))
    ahead.start_from(RECIPE, SETTINGS)
    ahead.work()
    assert len(planned) == 2
    asked.clear()
    ahead.work()
    assert len(planned) > 10


def test_a_plan_that_can_not_be_made_is_left_to_whoever_asks():
    def make_plan(recipe, progress):
        raise RuntimeError("no such plan")

    ahead = Ahead(make_plan, lambda: False)
    ahead.start_from(RECIPE, SETTINGS)
    ahead.work()
