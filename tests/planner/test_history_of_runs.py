"""Measurements of runs correct the next plan on the same card."""

from dataclasses import replace

import pytest

from finetune.card import find_card
from finetune.events import ForecastCheck, Start, State, Step
from finetune.files import cache_dir
from finetune.planner.history import MOST_RUNS, History, cost_of, read_history, record_run, seconds_spent
from finetune.planner.planner import make_plan
from finetune.recipe import parse_recipe
from finetune.run.memory import compare_with_forecast
from finetune.units import GIB

RECIPE = parse_recipe("model_name_or_path: Qwen/Qwen3-8B\ndataset: d\n")
pytestmark = pytest.mark.usefixtures("arithmetic")


def planned(recipe=RECIPE, gpu="rtx-4090"):
    return make_plan(recipe, find_card(gpu), None)


def measured(plan, **peaks):
    return compare_with_forecast(plan, [Step(step=1, **peaks)], at="end", step=1)


def test_measured_steps_correct_the_next_plans_times_on_the_same_card_and_make_a_cpus_known():
    first = planned()
    for slower in (1.4, 1.5, 1.6):
        record_run(first, ForecastCheck(), step_s=first.modelled_step_s * slower)
    second = planned()
    assert second.forecast.step_s == pytest.approx(1.5 * second.modelled_step_s)
    assert second.modelled_step_s == first.modelled_step_s
    assert any("3 earlier runs" in note for note in second.forecast.notes)
    assert read_history("rtx-3060") == History([], [])
    first = planned(gpu="cpu")
    assert first.forecast.step_s is None and first.forecast.tokens_per_s is None
    record_run(first, ForecastCheck(), step_s=50 * first.modelled_step_s)
    second = planned(gpu="cpu")
    assert second.forecast.step_s == pytest.approx(50 * second.modelled_step_s) and second.alternatives[0].step_s


def test_a_run_that_took_more_than_its_forecast_widens_the_next_interval():
    roomy = parse_recipe(
        "model_name_or_path: Qwen/Qwen3-8B\ndataset: d\nload_in_4bit: true\nmax_length: 1024\nper_device_train_batch_size: 1\n"
    )
    first = planned(roomy)  # it still fits with the wider interval, so it is tried again
    record_run(first, measured(first, peak_allocated_bytes=round(first.forecast.allocated_bytes * 1.05)), step_s=None)
    record_run(first, measured(first, peak_allocated_bytes=round(first.forecast.allocated_bytes * 0.98)), step_s=None)
    assert read_history("rtx-4090").errors("allocated") == pytest.approx([0.05, -0.02], abs=1e-6)
    second = planned(roomy)
    row = next((row for row in second.alternatives if row.peak_bytes == first.forecast.peak_bytes), None)
    assert row is not None and row.peak_high_bytes > first.forecast.peak_high_bytes


def test_reserved_memory_is_recorded_with_its_forecast():
    first = planned()
    replayed = replace(first.forecast, reserved_peaks={"train": 20 * GIB})
    replayed_plan = replace(first, forecast=replayed)
    for plan in (replayed_plan, first):  # the second is not replayed
        record_run(plan, measured(plan, peak_reserved_bytes=21 * GIB), step_s=None)
    assert read_history("rtx-4090").errors("reserved") == [pytest.approx(0.05)]
    assert any("reserved memory was +5.0% to +5.0% off the forecast" in note for note in planned().forecast.notes)


def test_only_the_newest_runs_are_kept_and_lines_that_are_torn_or_not_utf_8_do_no_harm():
    first = planned()
    for number in range(MOST_RUNS + 3):
        record_run(first, ForecastCheck(), step_s=first.modelled_step_s * (1 + number / 100))
    with (cache_dir() / "history.jsonl").open("ab") as file:
        file.write(b'{"card": "\xff\xfe"\n{"card": "rtx-40')
    assert len(read_history("rtx-4090").rows) == MOST_RUNS


def test_a_run_costs_its_attempts_and_not_the_time_between():
    events = [State(state="starting"), Step(step=1), State(state="paused"), State(state="starting"), Start(), Step(step=2)]
    times = (0.0, 10.0, 20.0, 1000.0, 1005.0, 1030.0)
    for event, time_s in zip(events, times, strict=True):
        object.__setattr__(event, "time_s", time_s)
    assert seconds_spent(events) == 50 and cost_of(7200, 0.5) == 1 and cost_of(7200, None) is None
