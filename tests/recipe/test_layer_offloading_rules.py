"""Settings that rule out layer offloading are refused, with what to set instead."""

import pytest

from finetune.errors import RecipeError
from finetune.recipe import parse_recipe

SHORT = "model_name_or_path: m\ndataset: d.jsonl\n"
REFUSED = {
    "activation_checkpointing=false": "set activation_checkpointing to auto or true",
    "activation_checkpointing_every_n_layers=2": "set activation_checkpointing_every_n_layers to auto or 1",
    "torch_compile=true": "set torch_compile=auto",
    "load_in_8bit=true": "use load_in_4bit",
    "launch.num_processes=2": "set launch.num_processes=1",
    "offloaded_layers=0": "set it to how many are offloaded",
}


def problems_of(*overrides):
    with pytest.raises(RecipeError) as error:
        parse_recipe(SHORT, overrides=list(overrides))
    return error.value.problems


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("override", REFUSED)
def test_what_does_not_work_with_offloaded_layers_is_refused_with_the_fix(device, override):
    (problem,) = problems_of(f"layer_offloading={device}", override)
    assert f"layer_offloading {device}" in problem or f"layer_offloading is {device}" in problem
    assert REFUSED[override] in problem


@pytest.mark.parametrize("strategy", ["fsdp", "deepspeed"])
def test_sharded_weights_are_moved_by_launch_offload(strategy):
    (problem,) = problems_of("layer_offloading=cpu", f"launch.strategy={strategy}", "launch.num_processes=2")
    assert "use launch.offload" in problem


@pytest.mark.parametrize("device", ["auto", "false"])
def test_a_number_of_layers_needs_a_place_for_them(device):
    (problem,) = problems_of("offloaded_layers=8", f"layer_offloading={device}")
    assert f"layer_offloading is {device}" in problem and "set layer_offloading=cpu" in problem


@pytest.mark.parametrize(
    "override",
    ["activation_checkpointing=selective", "activation_checkpointing=offload", "gpu=cpu", "use_dora=true", "lora_dropout=0.1",
     "load_in_4bit=false", "offloaded_layers=3", "int8_activations=true"],
)  # fmt: skip
def test_what_works_with_offloaded_layers_is_accepted(override):
    assert parse_recipe(SHORT, overrides=["layer_offloading=cpu", override]).layer_offloading == "cpu"
