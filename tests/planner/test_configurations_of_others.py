"""Configurations of LLaMA-Factory and Axolotl are planned without an edit, except that the data may be elsewhere."""

from pathlib import Path

import pytest

from finetune.card import find_card
from finetune.planner.planner import make_plan
from finetune.recipe import load_recipe

FOLDER = Path(__file__).parents[1] / "recipe" / "foreign"
FILES = [path.name for pattern in ("lf_*.yaml", "axolotl_*") for path in sorted(FOLDER.glob(pattern))]


def test_there_are_ten_of_them():
    assert len(FILES) == 10


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_it_is_planned_with_its_own_batch_rank_and_length(name, new_forecaster):
    recipe = load_recipe(FOLDER / name)
    settings = make_plan(recipe, find_card("a100-80gb"), None, forecaster=new_forecaster()).settings
    assert settings.per_device_train_batch_size * settings.gradient_accumulation_steps == recipe.effective_batch_size
    for name in ("learning_rate", "lora_r", "num_train_epochs", "max_steps", "max_length"):
        assert getattr(settings, name) == getattr(recipe, name), name
