"""Long rows: what the planner chooses for them, and a real step on the CPU against its dry run."""

import pytest
from real_run import forecast, measured, planned, save_model

from finetune.card import find_card
from finetune.errors import RecipeError
from finetune.planner.defaults import choose_basics
from finetune.planner.plan import Choices
from finetune.planner.shape import shape_of
from finetune.recipe import recipe_from

#: Tensors that the run holds and the dry run does not: micro-batches that wait for their turn.
WAITING_BYTES = 16 * 1024
PHASES = ("load", "forward", "loss", "loss backward", "backward", "optimizer", "save", "eval")
CASES = {
    "tiles": {"activation_checkpointing": True, "mlp_tile_tokens": 48},
    "table": {"offload_embeddings": True},
    "table-tiles-nf4": {
        "activation_checkpointing": True, "mlp_tile_tokens": 48, "load_in_4bit": True, "offload_embeddings": True,
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), [("llama", "tiles"), ("llama", "table"), ("qwen3", "table-tiles-nf4")])
def test_every_phase_of_a_run_needs_what_its_dry_run_says(tmp_path, kind, name):
    run, plan = planned(save_model(kind, tmp_path / "model"), tmp_path, **CASES[name])
    expected, seen = forecast(plan), measured(run)
    far = {
        phase: (expected[phase], seen[phase])
        for phase in PHASES
        if abs(expected[phase] - seen[phase]) > max(0.005 * seen[phase], WAITING_BYTES)
    }
    assert far == {}


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
