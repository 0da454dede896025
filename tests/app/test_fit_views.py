"""The Fit page's HTML says what the plan says: the sentence, the bar whose scale is the GPU, words instead of options."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from app.views import fit, memory_parts
from app.views.words import in_words
from finetune.card import find_card
from finetune.memory.forecast import Forecast
from finetune.planner.plan import LayerCopies, Plan, Suggestion, verdict_of
from finetune.recipe import load_recipe
from finetune.units import GIB

SETTINGS = SimpleNamespace(lora_r=16, max_length=2048, per_device_train_batch_size=1, load_in_4bit=True, load_in_8bit=False,
                           dtype="bfloat16", activation_checkpointing=False, optim="adamw", layer_offloading=False,
                           activation_checkpointing_every_n_layers=1)  # fmt: skip


def plan_of(peak, high, budget):
    forecast = Forecast(peak, peak, peak, peak, high, {"weights": peak}, {"train": peak, "load": GIB})
    card = find_card("rtx-3060")
    return Plan(SETTINGS, {}, card, verdict_of(forecast, budget), forecast=forecast, budget_bytes=budget,
                headroom_bytes=budget - high)  # fmt: skip


@pytest.mark.parametrize(("peak", "high", "sentence"), [
    (8 * GIB, 9 * GIB, "Fits, with 2.0 GiB to spare"), (10 * GIB, 12 * GIB, "Tight: 1.0 GiB too big at the upper end"),
    (12 * GIB, 19 * GIB, "Does not fit: 8.0 GiB too big"),
])  # fmt: skip
def test_the_verdict_is_a_sentence_with_its_gib(peak, high, sentence):
    assert sentence in fit.verdict(plan_of(peak, high, 11 * GIB))


def test_layers_that_are_not_on_the_gpu_are_no_green_fit():
    plan, copies = plan_of(8 * GIB, 9 * GIB, 11 * GIB), LayerCopies("", 80, 80, 33 * GIB, GIB, 256 * GIB, 1e10)
    forecast = replace(plan.forecast, step_s=125.0)
    slow, slower = (
        fit.verdict(replace(plan, verdict=verdict_of(forecast, 11 * GIB, target), forecast=forecast, layer_copies=copies))
        for target in ("cpu", "nvme")
    )
    assert 'ft-verdict warn"' in slow and "Fits, slow: 33.0 GiB of layers in host memory" in slow
    assert "Fits, very slow: layers on disk, 256.0 GiB moved and 2 min 05 s in each step" in slower


def test_the_cost_is_the_plans_own():
    plan = replace(plan_of(8 * GIB, 9 * GIB, 11 * GIB), settings=load_recipe("tiny-cpu"), total_steps=10)
    plan = replace(plan, forecast=replace(plan.forecast, step_s=360.0))
    assert "an hour" not in fit.facts(plan)
    plan = replace(plan, cost=2.0, settings=load_recipe("tiny-cpu", ["price_per_hour=2"]))
    assert "2.00 at 2 an hour" in fit.facts(plan)


def test_what_is_missing_is_counted_when_there_is_no_plan():
    assert "Unknown: 2 settings to correct" in fit.cannot_say(2)


@pytest.mark.parametrize("high", [9 * GIB, 19 * GIB])
@pytest.mark.parametrize("phase", ["train", "load"])
def test_the_parts_and_what_is_too_much_add_up_to_the_gpu(high, phase):
    plan = plan_of(8 * GIB, high, 11 * GIB)
    parts, over = memory_parts.parts_of(plan, phase)
    assert sum(part.size for part in parts) - over == plan.card.total_bytes
    assert over == (max(0, high - 11 * GIB) if phase == "train" else 0)
    assert sum(width for _, width in fit._widths(parts, plan.card.total_bytes)) == pytest.approx(100)


@pytest.mark.parametrize(("saves", "outcome"), [(5, "then it fits: 7.0 of 11.0 GiB"), (0.5, "still too big: 11.5 of 11.0 GiB")])
def test_a_suggestion_says_whether_the_plan_then_fits(saves, outcome):
    item = Suggestion("lora_r=8", round(saves * GIB), round((12 - saves) * GIB), "a smaller adapter")
    assert fit.outcome(item, plan_of(11 * GIB, 12 * GIB, 11 * GIB)) == outcome


def test_a_change_is_said_without_option_syntax():
    assert in_words("load_in_4bit=true load_in_8bit=false") == "Use 4-bit weights"
    assert in_words("activation_checkpointing=true activation_checkpointing_every_n_layers=3") == "Recompute 1 layer in 3"
    assert in_words("per_device_train_batch_size=2 gradient_accumulation_steps=8") == "2 rows at a time"


def test_a_number_of_the_planner_is_marked_and_another_can_go_back_to_it():
    assert "auto</span>" in fit.auto("lora_r", {}) and "auto</span>" in fit.auto("lora_r", {"lora_r": "auto"})
    assert "{&quot;auto&quot;: &quot;lora_r&quot;}" in fit.auto("lora_r", {"lora_r": 8})
