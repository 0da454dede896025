"""Settings and rows of one training method with another are refused when a recipe is read."""

import pytest

from finetune.errors import RecipeError
from finetune.recipe import recipe_from


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.2}, "beta is a setting of method dpo; the method is sft"),
        ({"loss_type": "ipo"}, "loss_type is a setting of method dpo"),
        ({"method": "dpo", "packing": True}, "packing does not work with method dpo: pairs are not packed"),
        ({"method": "dpo", "train_on_inputs": True}, "train_on_inputs does not work with method dpo"),
        ({"method": "dpo", "adapter_name_or_path": "runs/first"}, "merge that adapter first"),
        ({"method": "dpo", "launch": {"num_processes": 2, "strategy": "fsdp"}}, "strategy fsdp does not work with method dpo"),
        ({"dataset": {"path": "rows.jsonl", "format": "preference"}}, "format preference is for method dpo; the method is sft"),
        ({"method": "dpo", "dataset": {"path": "rows.jsonl", "format": "alpaca"}}, "format alpaca is for method sft"),
        ({"method": "dpo", "loss_type": "robust"}, "label_smoothing, the share of pairs in the wrong order, go together"),
        ({"method": "dpo", "label_smoothing": 0.1}, "go together"),
        ({"method": "dpo", "loss_type": "robust", "label_smoothing": 0.5}, "label_smoothing"),
        ({"sft_weight": 0.1}, "sft_weight is a setting of method dpo"),
        ({"method": "grpo"}, "method"),
        ({"method": "dpo", "loss_type": "orpo"}, "loss_type"),
        ({"method": "dpo", "beta": 0}, "beta"),
    ],
)
def test_what_does_not_go_together_is_named(settings, message):
    with pytest.raises(RecipeError, match=message):
        recipe_from({"model_name_or_path": "tiny", "dataset": "rows.jsonl", **settings})
