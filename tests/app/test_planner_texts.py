"""The planner's reasons and the forecast's notes on the page in Chinese: of plans of many kinds, no English is left."""

import re

import pytest

from app.language import spoken
from app.views.planner_texts import reason_in_words
from finetune.card import find_card
from finetune.planner.planning import plan_recipe, without_rows
from finetune.recipe import load_recipe
from finetune.settings.base_formats import QUANTISED
from tests.app.test_language import english_in

#: What has one name in every language; where a catalogue's numbers come from stays as it was written.
NAMES = re.compile(
    r"\b(torch|varlen|dropout|(Q|rs)?LoRA|Without Regret|MLP|RoPE|NF4|int8|AdamW|SFT|alpha|sqrt|CUDA|CPU|bfloat16|NVIDIA|FSDP|"
    r"Unsloth|Lion|arXiv|Triton|Linear\w+|rtx-\w+|[a-z]+_[a-z_]+|llama|cpu|true|false|int)\b"
)
TINY = "tiny-cpu"
OPEN = ["load_in_4bit=auto", "activation_checkpointing=auto", "per_device_train_batch_size=auto", "gpu=rtx-4060"]
PLANS = {
    "old card": [*OPEN, "gpu=rtx-2060"],
    "int8": [*OPEN, "load_in_8bit=true", "lora_dropout=0.05"],
    "offloaded": [*OPEN, "layer_offloading=cpu", "method=pretrain", "optim=lion_8bit"],
    "sharded": [*OPEN, "launch.num_processes=2", "launch.strategy=fsdp"],
    "too big": [*OPEN, "memory_budget=600MiB"],
}


def test_reasons_of_the_tables_are_chinese():
    reasons = {row.reason_against for row in QUANTISED}
    with spoken("zh"):
        assert [text for text in filter(None, reasons) if reason_in_words(text) == text] == []


@pytest.mark.slow
@pytest.mark.parametrize("overrides", PLANS.values(), ids=list(PLANS))
def test_reasons_and_notes_are_chinese(overrides):
    recipe = load_recipe(TINY, overrides)
    plan = plan_recipe(recipe, find_card(recipe.gpu), without_rows)
    reasons = {name: reason.split("; memory")[0] for name, reason in plan.reasons.items()}
    with spoken("zh"):
        shown = [reason_in_words(text) for text in [*reasons.values(), *plan.forecast.notes]]
    assert [text for text in shown if english_in(NAMES.sub("", text))] == []
