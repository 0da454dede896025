"""Long rows: what the planner chooses for them."""

import pytest

from finetune.card import find_card
from finetune.errors import RecipeError
from finetune.planner.defaults import choose_basics
from finetune.planner.plan import Choices
from finetune.planner.shape import shape_of
from finetune.recipe import recipe_from

MODEL = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 131072,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "tile"),
    [({"max_length": 8192}, 0), ({"max_length": 8193}, 4096), ({"max_length": 8193, "lora_dropout": 0.1}, 0)],
)
def test_long_rows_have_tiles(changes, tile):
    recipe = recipe_from({"model_name_or_path": "a/b", "dataset": "rows.jsonl", **changes})
    choices = choose_basics(Choices(recipe), find_card("rtx-4090"), MODEL, shape_of(MODEL, recipe), None)
    assert choices.value("mlp_tile_tokens") == tile


def test_tiles_need_lean_layers():
    with pytest.raises(RecipeError, match="mlp_tile_tokens needs lean layers, which do not work with lora_dropout"):
        recipe_from({"model_name_or_path": "a/b", "dataset": "r", "mlp_tile_tokens": 64, "lora_dropout": 0.1})
