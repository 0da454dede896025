"""A plan of pairs says what they cost beside SFT with the same settings."""

import re

import pytest

from finetune.card import find_card
from finetune.planner.planner import make_plan
from finetune.recipe import recipe_from

FIXED = {
    "model_name_or_path": "Qwen/Qwen3-0.6B", "dataset": "rows.jsonl", "gpu": "4090", "max_length": 1024, "load_in_4bit": False,
    "activation_checkpointing": True, "activation_checkpointing_every_n_layers": 1, "per_device_train_batch_size": 2,
    "effective_batch_size": 8, "optim": "adamw_torch", "packing": False, "lora_r": 8, "learning_rate": 1e-5,
}  # fmt: skip


def planned(**settings):
    recipe = recipe_from({**FIXED, **settings})
    return make_plan(recipe, find_card(recipe.gpu), None, compare=True).forecast


@pytest.mark.slow
def test_the_price_of_pairs_is_that_of_two_plans():
    pairs, answers = planned(method="dpo", loss_type="ipo", beta=0.2), planned()
    assert not [note for note in answers.notes if "of method sft" in note]
    [note] = [note for note in pairs.notes if note.startswith("method dpo takes ")]
    memory, time = map(float, re.findall(r"([\d.]+) x the", note))
    assert memory == pytest.approx(pairs.peak_bytes / answers.peak_bytes, abs=0.051)
    assert time == pytest.approx(pairs.step_s / answers.step_s, abs=0.051)
    assert memory > 1 and time > 1.5  # the host is the limit of so small a model's steps
