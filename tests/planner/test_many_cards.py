"""A plan that does not fit one card shows the memory of each of several, and which launch strategy fits."""

import json

import pytest

from finetune.card import find_card
from finetune.memory.device_peak import make_forecast
from finetune.planner.plan import Plan
from finetune.planner.planner import make_plan
from finetune.planner.suggest import needs_of_each_card
from finetune.recipe import recipe_from
from finetune.settings import resolved
from finetune.units import GIB

CARD = find_card("rtx-4090")
#: 16-bit weights are most of it, so that splitting them pays.
VALUES = {
    "model_name_or_path": "meta-llama/Llama-3.2-1B-Instruct", "dataset": "rows.jsonl", "max_length": 2048, "lora_r": 64,
    "load_in_4bit": False, "load_in_8bit": False, "optim": "adamw_torch_fused", "activation_checkpointing": True,
    "activation_checkpointing_every_n_layers": 1, "per_device_train_batch_size": 4, "effective_batch_size": 32,
}  # fmt: skip


def planned(card=CARD, **more):
    return make_plan(recipe_from({**VALUES, **more}), card, None)


def by_name(plan):
    return {row.strategy: row for row in plan.many_cards.rows}


@pytest.fixture(scope="module")
def eight():
    """The plan on eight cards that split the model, with the needs of each way."""
    return planned(launch={"num_processes": 8, "strategy": "fsdp"})


@pytest.mark.slow
def test_what_fits_only_sharded_says_so(eight):
    enough = {"memory_budget": f"{1.01 * by_name(eight)['fsdp'].peak_high_bytes / GIB:.3f}GiB"}
    whole = planned(launch={"num_processes": 8}, **enough)
    assert whole.verdict == by_name(whole)["ddp"].verdict != "fits"
    assert by_name(whole)["fsdp"].verdict == "fits"
    assert by_name(whole)["fsdp"].override == "launch.num_processes=8 launch.strategy=fsdp"
    assert planned(launch={"num_processes": 8, "strategy": "fsdp"}, **enough).verdict == "fits"


def test_sharding_as_planned_trains_in_less_memory_and_loads_the_whole_model(eight):
    needs, peaks = by_name(eight), eight.forecast.peaks
    assert (needs["fsdp"].train_bytes, needs["fsdp"].load_bytes) == (peaks["train"], peaks["load"])
    assert needs["fsdp"].peak_high_bytes == eight.forecast.peak_high_bytes
    assert needs["fsdp, offload to cpu"].train_bytes < needs["fsdp"].train_bytes < needs["ddp"].train_bytes
    assert needs["fsdp"].load_bytes > needs["ddp"].load_bytes >= 2 * 1.2e9
    assert all(row.verdict == "fits" and row.cost == "" for row in needs.values())


@pytest.mark.slow
def test_one_card_that_fits_has_no_table_and_one_that_does_not_is_compared_with_two(arithmetic):
    assert planned().many_cards is None
    small = planned(find_card("rtx-4090", free_bytes=2 * GIB))
    assert small.verdict == "does not fit" and small.many_cards.cards == 2
    assert [row.strategy for row in small.many_cards.rows] == ["ddp", "fsdp", "fsdp, offload to cpu", "deepspeed zero-3"]
    assert Plan.from_json(json.loads(json.dumps(small.as_json()))).many_cards == small.many_cards


def test_a_method_that_can_not_be_sharded_says_so_in_the_table(arithmetic):
    small = planned(find_card("rtx-4090", free_bytes=2 * GIB), method="dpo", layer_offloading=False)
    assert by_name(small)["ddp"].train_bytes and "does not work with method dpo" in by_name(small)["fsdp"].cost


@pytest.mark.parametrize(("micro", "steps", "cards"), [(1, 16, 2), (4, 1, 2), (3, 3, 3), (1, 5, 5), (1, 1, None)])
def test_the_effective_batch_is_kept_on_every_number_of_cards(micro, steps, cards):
    recipe = recipe_from({**VALUES, "per_device_train_batch_size": "auto", "effective_batch_size": micro * steps})
    alone = {"per_device_train_batch_size": micro, "gradient_accumulation_steps": steps, "optim": "adamw_8bit"}
    seen = []

    def forecast(changed):
        seen.append(changed)
        raise MemoryError

    settings = resolved(recipe, **alone)
    if cards is None:
        assert needs_of_each_card(recipe, settings, GIB, forecast) is None
        return
    with pytest.raises(MemoryError):
        needs_of_each_card(recipe, settings, GIB, forecast)
    (asked,) = seen
    assert asked.launch.num_processes == cards
    assert asked.per_device_train_batch_size * asked.gradient_accumulation_steps * cards == micro * steps


@pytest.mark.slow
def test_settings_that_can_not_be_sharded_are_replaced_and_reported(arithmetic):
    settings = {"optim": "adamw_8bit", "activation_checkpointing": "offload", "load_in_4bit": True}
    plan = planned(find_card("rtx-4090", free_bytes=2 * GIB), **settings)
    needs = by_name(plan)
    assert "optim" not in needs["ddp"].override
    assert "optim=adamw_torch_fused" in needs["fsdp"].override
    assert "activation_checkpointing=true" in needs["deepspeed zero-3"].override


@pytest.mark.slow
def test_the_planner_chooses_only_what_a_sharded_model_can_do(forecast_by):
    open_recipe = dict.fromkeys(("load_in_4bit", "load_in_8bit", "activation_checkpointing", "optim"), "auto")
    tried = []
    forecast_by(lambda config, settings, *card, **how: tried.append(settings) or make_forecast(config, settings, *card, **how))
    planned(launch={"num_processes": 2, "strategy": "fsdp"}, **open_recipe)
    split = [settings for settings in tried if settings.launch.strategy != "ddp"]
    assert {settings.optim for settings in split} == {"adamw_torch_fused"}
    assert not any(settings.load_in_8bit for settings in split)
