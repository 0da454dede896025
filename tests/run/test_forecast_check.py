"""Measured memory is compared with the forecast after the first two steps, and for the peak of all steps at the end."""

from dataclasses import replace

import pytest

from finetune.card import find_card
from finetune.events import Evaluation, EventWriter, ForecastCheck, Start, Step
from finetune.planner.plan import read_plan
from finetune.run.callbacks import others_warning, spill_warning
from finetune.run.directory import RunDirectory
from finetune.run.memory import MARGIN, compare_with_forecast, excess_warning, outcome
from finetune.run.state import COMPARED, NOT_COMPARED, compare_held_out

pytestmark = pytest.mark.slow
GIB = 2**30


@pytest.fixture(scope="module")
def plan(make_run):
    return read_plan(make_run().plan)


def step(number, allocated, used=None, others=None):
    gpu = Step(step=number, peak_allocated_bytes=allocated, card_used_bytes=used, other_processes_bytes=others)
    return replace(gpu, process_peak_rss_bytes=others and used - others)


def test_at_the_end_the_highest_of_all_steps_counts_and_what_was_not_measured_is_unknown(plan):
    forecast = plan.forecast.allocated_bytes
    steps = [step(1, 7, 5 * GIB, 3 * GIB), step(2, round(1.25 * forecast), 4 * GIB, GIB), step(3, 8)]
    check = compare_with_forecast(plan, steps, at="end", step=3)
    assert (check.at, check.step, check.predicted_allocated_bytes, check.measured_card_bytes) == ("end", 3, forecast, 3 * GIB)
    assert check.measured_allocated_bytes == round(1.25 * forecast)
    check = compare_with_forecast(plan, [step(1, None, 3 * GIB)], at="end", step=1)
    assert check.measured_allocated_bytes is check.measured_card_bytes is None
    assert check.predicted_context_bytes is check.predicted_card_used_bytes is None  # of a run on a CPU
    assert excess_warning(plan, check) is None


def test_the_context_other_programs_and_the_whole_gpu_are_compared_too(plan):
    card = find_card("rtx-4090", free_bytes=20 * GIB)
    used_and_others = [(9 * GIB, 4 * GIB), (8 * GIB, 3 * GIB), (9 * GIB, GIB)]
    samples = [replace(step(1, 1, *pair), reserved_bytes=4 * GIB) for pair in used_and_others]
    check = compare_with_forecast(replace(plan, card=card), samples, at="end", step=3)
    assert (check.predicted_context_bytes, check.measured_context_bytes) == (card.context_bytes, GIB)  # the median
    others = card.total_bytes - 20 * GIB
    assert (check.predicted_other_processes_bytes, check.measured_other_processes_bytes) == (others, 4 * GIB)
    assert (check.predicted_card_used_bytes, check.measured_card_used_bytes) == (check.predicted_peak_bytes + others, 9 * GIB)


def test_a_run_ends_with_its_time_its_peak_beside_the_forecast_and_its_losses():
    check = ForecastCheck(predicted_peak_bytes=20 * GIB, measured_reserved_bytes=17 * GIB, measured_context_bytes=GIB)
    events = [Start(time_s=1.0), replace(step(1, None), loss=8.5), replace(step(9, None), loss=0.161), check]
    events += [Evaluation(step=9, eval_loss=0.2), Evaluation(step=12, eval_loss=0.3, time_s=23.0)]
    assert outcome(events) == ("22 s. Peak 18.0 GiB, forecast 20.0 GiB (-10.0%). Loss 8.5 -> 0.161, held out 0.2.", False)
    events[3] = replace(check, predicted_low_bytes=19 * GIB, predicted_high_bytes=21 * GIB)
    text, is_outside = outcome(events)
    assert is_outside and "(-10.0%, outside its interval, 19.0 GiB to 21.0 GiB)" in text


def test_losses_are_compared_at_the_last_step_that_every_run_evaluated(tmp_path):
    runs = [RunDirectory(tmp_path / name) for name in ("long", "short")]
    for run, last in zip(runs, (250, 90), strict=True):
        run.path.mkdir()
        writer = EventWriter(run.events)
        for number in (50, 80, last):
            writer.emit(Evaluation(step=number, eval_loss=number / last))
    template, values = compare_held_out(runs)
    assert (template, values["step"]) == (COMPARED, "80") and values["losses"].endswith("short 0.8889")
    assert compare_held_out([*runs, RunDirectory(tmp_path)])[0] == NOT_COMPARED


def checked(plan, allocated):
    return compare_with_forecast(plan, [step(1, allocated // 2), step(2, allocated)], at="first steps", step=2)


def test_more_than_forecast_is_a_warning_unless_the_run_was_forced(plan):
    forecast = plan.forecast.allocated_bytes
    assert excess_warning(plan, checked(plan, round((1 + MARGIN) * forecast) - 1)) is None
    assert "but the forecast was" in excess_warning(plan, checked(plan, 2 * forecast))
    assert excess_warning(replace(plan, verdict="does not fit"), checked(plan, 2 * forecast)) is None


def test_other_programs_that_take_memory_and_a_spill_are_warned_of():
    before, after = (Step(step=1, other_processes_bytes=used) for used in (GIB, 3 * GIB))
    assert others_warning(before, before) == others_warning(before, after) == ""
    assert others_warning(after, before) == "other programs use 2.00 GiB more GPU memory than before"
    assert spill_warning(Step(step=1)) == ""
    used = Step(step=1, reserved_bytes=7 * GIB, card_total_bytes=8 * GIB, other_processes_bytes=GIB)
    assert spill_warning(used) == ""
    assert "9.00 GiB are in use on a GPU with 8.00 GiB: the driver spills" in spill_warning(
        replace(used, reserved_bytes=8 * GIB)
    )
