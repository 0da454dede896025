"""Settings that can't be combined are refused when a recipe is read: by method, and with layer offloading."""

import itertools

import pytest

from finetune.errors import RecipeError
from finetune.recipe import parse_recipe, recipe_from

SHARDED = {"num_processes": 2, "strategy": "fsdp"}
REFUSED = {
    "activation_checkpointing=false": "set activation_checkpointing to auto or true",
    "activation_checkpointing_every_n_layers=2": "set activation_checkpointing_every_n_layers to auto or 1",
    "torch_compile=true": "set torch_compile=auto",
    "load_in_8bit=true": "use load_in_4bit",
    "launch.num_processes=2": "set launch.num_processes=1",
    "offloaded_layers=0": "set offloaded_layers to 1 or more",
}


def problems_of(*overrides):
    with pytest.raises(RecipeError) as error:
        parse_recipe("model_name_or_path: m\ndataset: d.jsonl\n", overrides=overrides)
    return error.value.problems


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"beta": 0.2}, "beta is a setting of method dpo and kto; the method is sft"),
        ({"method": "dpo", "packing": True}, "packing does not work with method dpo: pairs are not packed"),
        ({"method": "dpo", "train_on_inputs": True}, "train_on_inputs does not work with method dpo"),
        ({"method": "kto", "packing": True}, "packing does not work with method kto"),
        ({"method": "kto", "train_on_inputs": True}, "train_on_inputs does not work with method kto"),
        ({"method": "kto", "loss_type": "ipo"}, "loss_type ipo is not one of method kto: kto, apo_zero_unpaired"),
        ({"method": "dpo", "loss_type": "kto"}, "loss_type kto is not one of method dpo"),
        ({"method": "kto", "sft_weight": 0.1}, "sft_weight is a setting of method dpo; the method is kto"),
        ({"method": "dpo", "desirable_weight": 2.0}, "desirable_weight is a setting of method kto; the method is dpo"),
        ({"method": "kto", "per_device_train_batch_size": 1}, "is too small for method kto, use 2 or more: its KL term"),
        ({"method": "kto", "effective_batch_size": 4, "gradient_accumulation_steps": 4}, "leaves a micro-batch of 1"),
        ({"method": "kto", "launch": SHARDED}, "strategy fsdp does not work with method kto"),
        ({"method": "dpo", "dataset": {"path": "rows.jsonl", "format": "labelled"}}, "format labelled is for method kto"),
        ({"method": "dpo", "launch": SHARDED}, "strategy fsdp does not work with method dpo"),
        ({"dataset": {"path": "rows.jsonl", "format": "preference"}}, "format preference is for method dpo; the method is sft"),
        ({"method": "dpo", "dataset": {"path": "rows.jsonl", "format": "alpaca"}}, "format alpaca is for method sft"),
        ({"method": "dpo", "loss_type": "robust"}, r"label_smoothing \(share of pairs in the wrong order\) go together"),
        ({"method": "dpo", "loss_type": "robust", "label_smoothing": 0.5}, "label_smoothing"),
        ({"method": "grpo"}, "method"),
        ({"method": "pretrain", "train_on_inputs": True}, "train_on_inputs does not work with method pretrain: plain text has"),
        ({"method": "pretrain", "chat_template": "plain"}, "chat_template does not work with method pretrain"),
        ({"method": "pretrain", "dataset": {"path": "rows.jsonl", "format": "messages"}}, "format messages is for method sft"),
        ({"new_tokens": ["<a>"], "launch": SHARDED}, "new_tokens do not work with launch.st"),
        ({"new_tokens": ["<a>"], "offload_embeddings": True}, "offload_embeddings does not work with new_tokens"),
        ({"trained_embedding_rows": [7, 7]}, "are not a first and end row"),
        ({"method": "dpo", "loss_type": "orpo"}, "loss_type"),
        ({"method": "dpo", "beta": 0}, "beta"),
        ({"optim": "adamw_cpu_offload", "launch": SHARDED}, "optim adamw_cpu_offload does not work on parameters sharded"),
        ({"layer_offloading": "cpu", "launch": SHARDED}, "use launch.offload"),
        ({"layer_offloading": "cpu", "launch": {**SHARDED, "strategy": "deepspeed"}}, "use launch.offload"),
        ({"offloaded_layers": 8}, "layer_offloading is auto; set layer_offloading=cpu"),
        ({"offloaded_layers": 8, "layer_offloading": False}, "layer_offloading is false; set layer_offloading=cpu"),
    ],
)
def test_what_does_not_go_together_is_named(settings, message):
    with pytest.raises(RecipeError, match=message):
        recipe_from({"model_name_or_path": "tiny", "dataset": "rows.jsonl", **settings})


def test_plain_text_is_read_by_two_methods_and_pretraining_cuts_long_texts_unless_the_recipe_says_otherwise():
    values = {"model_name_or_path": "tiny", "dataset": "rows.jsonl", "method": "pretrain"}
    for more, expected in (({}, "chunk"), ({"excess_length": "drop"}, "drop"), ({"method": "sft"}, "raise")):
        assert recipe_from(values | more).excess_length == expected
    for method, row_format in itertools.product(("sft", "pretrain"), ("text", "auto")):
        recipe_from(values | {"dataset": {"path": "rows.jsonl", "format": row_format}, "method": method})


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("override", REFUSED)
def test_what_does_not_work_with_offloaded_layers_is_refused_with_the_fix(device, override):
    (problem,) = problems_of(f"layer_offloading={device}", override)
    assert f"layer_offloading {device}" in problem or f"layer_offloading is {device}" in problem
    assert REFUSED[override] in problem


def test_what_works_with_offloaded_layers_is_accepted():
    for override in (
        "activation_checkpointing=selective", "activation_checkpointing=offload", "gpu=cpu", "use_dora=true",
        "lora_dropout=0.1", "load_in_4bit=false", "offloaded_layers=3",
    ):  # fmt: skip
        parse_recipe("model_name_or_path: m\ndataset: d.jsonl\n", overrides=["layer_offloading=cpu", override])
