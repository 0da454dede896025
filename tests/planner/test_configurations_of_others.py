"""A converted configuration of each tool is planned with its own batch, rank and length, and with the data elsewhere."""

from pathlib import Path

import pytest

from finetune.card import find_card
from finetune.planner.planner import make_plan
from finetune.recipe import load_recipe, write_recipe
from finetune.recipe.foreign import convert_file

FOLDER = Path(__file__).parents[1] / "recipe" / "foreign"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-factory", "axolotl", "trl"])
def test_it_is_planned_with_its_own_batch_rank_and_length(name, new_forecaster, tmp_path):
    (tmp_path / "recipe.yaml").write_text(write_recipe(convert_file(str(FOLDER / f"{name}.yaml"))[0]))
    recipe = load_recipe(tmp_path / "recipe.yaml", ["dataset.path=none"])
    settings = make_plan(recipe, find_card("a100-80gb"), None, forecaster=new_forecaster()).settings
    assert settings.per_device_train_batch_size * settings.gradient_accumulation_steps == recipe.effective_batch_size
    for setting in ("learning_rate", "lora_r", "num_train_epochs", "max_steps", "max_length"):
        assert getattr(settings, setting) == getattr(recipe, setting), setting
