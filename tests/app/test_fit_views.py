"""The Fit page's HTML says what the plan says: the sentence, the bar whose scale is the GPU, words instead of options."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from app.pages.fit_layout import bars_head
from app.planning.what_if import Outcome, Outcomes
from app.views import fit, memory_parts, what_if
from app.views.verdicts import verdict_in_words
from app.views.words import in_words, minutes
from finetune.card import find_card
from finetune.memory.forecast import Forecast
from finetune.planner.plan import Plan, Suggestion, verdict_of
from finetune.recipe import load_recipe
from finetune.settings import resolved
from finetune.units import GIB, gib

SETTINGS = SimpleNamespace(lora_r=16, max_length=2048, per_device_train_batch_size=1, load_in_4bit=True, load_in_8bit=False,
                           dtype="bfloat16")  # fmt: skip


def plan_of(peak, high, budget):
    forecast = Forecast(peak, peak, peak, peak, high, {"weights": peak}, {"train": peak, "load": GIB})
    card = find_card("rtx-3060")
    return Plan(SETTINGS, {}, card, verdict_of(forecast, budget), forecast=forecast, budget_bytes=budget,
                headroom_bytes=budget - high)  # fmt: skip


@pytest.mark.parametrize(("peak", "high", "sentence"), [
    (8 * GIB, 9 * GIB, "Fits, with 2.0 GiB to spare"), (10 * GIB, round(10.9 * GIB), "Fits, just: 0.1 GiB to spare"),
    (10 * GIB, 12 * GIB, "May not fit: up to 1.0 GiB too big"), (18 * GIB, 19 * GIB, "Too big by 8.0 GiB"),
])  # fmt: skip
def test_the_verdict_is_a_sentence_with_its_gib(peak, high, sentence):
    plan = plan_of(peak, high, 11 * GIB)
    assert verdict_in_words(plan) == sentence


def test_the_cost_is_the_plans_own():
    plan = replace(plan_of(8 * GIB, 9 * GIB, 11 * GIB), settings=load_recipe("tiny-cpu"), total_steps=10)
    plan = replace(plan, forecast=replace(plan.forecast, step_s=360.0))
    assert "an hour" not in fit.facts(plan)
    plan = replace(plan, cost=2.0, settings=load_recipe("tiny-cpu", ["price_per_hour=2"]))
    assert "2.00 at 2 an hour" in fit.facts(plan)


def test_what_is_missing_is_counted_when_there_is_no_plan():
    assert "Can&#x27;t say yet: 2 settings to correct" in fit.cannot_say(2)


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


def test_numbers_have_one_form():
    assert [gib(22.72 * GIB), gib(0.05 * GIB), minutes(2460), minutes(65_700)] == [
        "22.7 GiB",
        "51 MiB",
        "41 min",
        "18 h 15 min",
    ]


def test_a_plan_that_was_not_made_has_an_outline_and_no_number():
    planned = Outcome(16, {"en": "4-bit weights"}, 5 * GIB, 11 * GIB, 600.0, 3000.0)
    around = [Outcome(8), planned, Outcome(32, problem="no")]
    html = what_if.what_if("lora_r", "LoRA rank", around, planned, what_if.measure_of(around), is_auto=True)
    assert 'class="none"' in html and 'aria-label="8: not planned yet"><em></em>' in html
    assert "16: 10 minutes of training, 4-bit weights" in html and "×" in html


def test_bars_say_what_they_are_of():
    timed, sized = Outcome(16, {}, 5 * GIB, 11 * GIB, 600.0, 3000.0), Outcome(16, {}, 5 * GIB, 11 * GIB)
    assert "Bars" not in bars_head()
    assert "Bars: minutes of training. Each" in bars_head(what_if.measure_of([Outcome(8), timed]).name)
    assert "Bars: tokens/s. Each" in bars_head(what_if.measure_of([replace(timed, seconds=None)]).name)
    assert "Bars: GiB at most. Each" in bars_head(what_if.measure_of([sized]).name)


def test_outcomes_of_the_planner_process_are_read_by_the_page(tmp_path):
    written, read = Outcomes(tmp_path / "file"), Outcomes(tmp_path / "file")
    recipe = load_recipe("tiny-cpu")
    written.clear()
    assert not read.has(recipe)
    written.add(recipe, {"value": 0, "problem": "no"})
    assert read.has(recipe) and read.count == 1
    written.clear()
    assert read.count == 0  # another planner process, with other data


def test_a_plan_for_another_budget_is_not_shown(tmp_path):
    outcomes, recipe = Outcomes(tmp_path / "file"), load_recipe("tiny-cpu")
    plan = plan_of(8 * GIB, 9 * GIB, 11 * GIB)
    outcomes.add(resolved(recipe, lora_r=8), {"value": 0, "peak_high_bytes": GIB, "budget_bytes": 11 * GIB})
    outcomes.add(resolved(recipe, lora_r=32), {"value": 0, "peak_high_bytes": GIB, "budget_bytes": 8 * GIB})
    around = {outcome.value: outcome for outcome in outcomes.around(recipe, plan, "lora_r", Outcome(16))}
    assert around[8].is_made and not around[32].is_made
