"""What a short answer says about the next step."""

import pytest

from finetune.errors import RecipeError
from finetune.recipe import load_recipe
from finetune.run.directory import open_run


def test_without_runs_the_named_recipe_is_a_shipped_one(tmp_path):
    with pytest.raises(RecipeError) as raised:
        open_run("latest", tmp_path)
    load_recipe(raised.value.fix.split()[-1])
