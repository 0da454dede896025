"""What the planner suggests, searches and retries never breaks a rule of the recipe."""

import dataclasses

import pytest

from finetune.card import find_card
from finetune.planner.planner import make_plan
from finetune.recipe import recipe_from
from finetune.run.retry import next_smaller
from finetune.settings import resolved

pytestmark = pytest.mark.usefixtures("arithmetic")
QWEN_8B = "Qwen/Qwen3-8B"
TWO = {"num_processes": 2}
RECIPES = {
    "a sharded model with a set optimizer": {
        "optim": "adamw_torch", "launch": {**TWO, "strategy": "fsdp"}, "max_length": 32768,
    },
    "ZeRO-3": {"launch": {**TWO, "strategy": "deepspeed", "zero_stage": 3}, "max_length": 32768, "load_in_4bit": True},
    "every second layer of a compiled model": {
        "torch_compile": True, "activation_checkpointing_every_n_layers": 2, "max_length": 32768,
    },
    "int8 weights": {"load_in_8bit": True, "max_length": 32768},
    "a model's own code": {"trust_remote_code": True, "model_revision": "a" * 40, "max_length": 65536},
}  # fmt: skip


@pytest.fixture(autouse=True)
def host_memory(monkeypatch):
    """Sets the host memory that is free for offloaded layers."""

    def has(free):
        monkeypatch.setattr("finetune.run.retry.free_for_run", lambda: free)

    has(2**40)
    return has


def planned(gpu, compare=False, **recipe):
    recipe = recipe_from({"model_name_or_path": QWEN_8B, "dataset": "rows.jsonl", **recipe})
    return make_plan(recipe, find_card(gpu), None, compare=compare)


def retried(recipe, phase="train"):
    """The settings of every retry of this recipe."""
    plan, tried = planned("rtx-4090", **recipe), []
    while changes := next_smaller(plan, phase):
        plan = dataclasses.replace(plan, settings=resolved(plan.settings, **changes))
        tried.append(plan.settings)
    return tried


def test_the_last_retry_moves_all_layers_to_host_memory(host_memory):
    *others, last = retried({})
    assert {settings.layer_offloading for settings in others} <= {False}
    assert (last.layer_offloading, last.offloaded_layers, last.activation_checkpointing) == ("cpu", 36, "offload")
    assert [settings.layer_offloading for settings in retried({}, phase="load")] == [False, "cpu"]
    resident = {"offload_embeddings": False}
    assert retried({**resident, "layer_offloading": False}, phase="load") == []
    assert retried({**resident, "torch_compile": True}, phase="load") == []
    host_memory(2**30)
    assert retried(resident, phase="load") == []


@pytest.mark.slow
def test_the_input_embedding_is_moved_before_the_layers_where_the_output_layer_has_its_own():
    *others, last = retried({})
    assert (others[-1].offload_embeddings, others[-1].layer_offloading) == (True, False) and last.offload_embeddings
    for recipe in ({"model_name_or_path": "Qwen/Qwen3-4B"}, {"offload_embeddings": False}):
        assert {settings.offload_embeddings for settings in retried(recipe)} == {False}


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_that_does_not_fit_is_planned_and_retried_within_its_rules(name):
    plan = planned("rtx-3060", compare=True, **RECIPES[name])
    assert plan.verdict != "fits"
    tried = 0
    while changes := next_smaller(plan, "train"):  # raises when a change is not allowed
        plan, tried = dataclasses.replace(plan, settings=resolved(plan.settings, **changes)), tried + 1
    assert tried < 20


@pytest.mark.slow
def test_a_smaller_host_takes_no_inputs_of_layers_that_it_can_not_hold():
    recipe = {"load_in_4bit": True, "max_length": 16384, "packing": False, "per_device_train_batch_size": 1, "lora_r": 8}
    large, small = (planned("rtx-3060", host_memory=memory, **recipe) for memory in ("64GiB", "4GiB"))
    assert (large.settings.activation_checkpointing, large.verdict) == ("offload", "fits")
    assert small.settings.activation_checkpointing != "offload" and small.verdict != "fits"
    assert any("pins 4.50 GiB of host memory; 3.22 GiB are available" in note for note in small.forecast.notes)
    # what the recipe sets is planned
    chosen = planned("rtx-3060", host_memory="4GiB", activation_checkpointing="offload", **recipe)
    assert chosen.settings.activation_checkpointing == "offload"
