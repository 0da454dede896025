"""The length of a run as a range from whole runs that were measured here."""

import math
import random

import pytest

from finetune.planner.run_time import MeasuredRun, run_time, slowdowns_by_load


def measured(*factors, model="m", load_s=0.001):
    return [MeasuredRun(model, 10.0, 10.0 * factor, load_s) for factor in factors]


def test_without_a_measured_run_nothing_is_said():
    assert run_time(10.0, "m", []) is None and run_time(None, "m", measured(1.0)) is None


def test_after_one_run_the_range_is_half_to_double():
    time = run_time(20.0, "m", measured(3.0, load_s=5.0))
    assert math.isclose(time.low_s, 35.0) and math.isclose(time.likely_s, 65.0) and math.isclose(time.high_s, 125.0)


def test_runs_of_the_same_model_say_more_than_others():
    time = run_time(10.0, "m", [*measured(1.0, 1.0, 1.0), *measured(9.0, model="other")])
    assert (time.runs, time.same_model) == (3, True) and time.high_s < 13
    assert run_time(10.0, "third", measured(1.0)).same_model is False


def test_a_machine_whose_speed_changes_has_a_range_wider_than_half_to_double():
    assert run_time(10.0, "m", measured(1.0, 4.0, 2.0)).high_s > 10 * 2.0 * 2


@pytest.mark.parametrize("deviation", [0.05, 0.15, 0.5])
def test_the_range_covers_nine_in_ten_further_runs(deviation):
    rng, covered = random.Random(0), 0
    for _ in range(400):
        *before, further = (math.exp(rng.gauss(0.3, deviation)) for _ in range(6))
        time = run_time(10.0, "m", measured(*before))
        covered += time.low_s <= 10 * further <= time.high_s
    assert covered >= 360


def test_cpu_seconds_say_what_a_run_takes_when_other_programs_end_or_start():
    """A run that waited for four of five seconds: alone it takes a fifth, and again five times that under the same load."""
    busy = [MeasuredRun("m", 10.0, 50.0, 1e-3, 10.0)]
    idle_now, busy_now = run_time(10.0, "m", busy, (1.0,)), run_time(10.0, "m", busy, (5.0, 2.0))
    assert math.isclose(idle_now.low_s, 10 / 1.5, rel_tol=1e-3) and math.isclose(idle_now.high_s, 15, rel_tol=1e-3)
    assert busy_now.low_s == idle_now.low_s and math.isclose(busy_now.high_s, 75, rel_tol=1e-3)
    assert "as busy as it was of late" in busy_now.summary and "busy" not in idle_now.summary
    assert math.isclose(busy_now.likely_s, 50.001) and idle_now.likely_s == idle_now.high_s


def test_a_run_without_cpu_seconds_says_what_it_took_whatever_the_load_is_now():
    measured = [MeasuredRun("m", 10.0, 50.0, 1.0)]
    assert run_time(10.0, "m", measured, (5.0, 2.0)) == run_time(10.0, "m", measured)


def test_threads_of_others_take_an_equal_share_of_the_cpus():
    assert slowdowns_by_load((0.0, 2.0, 6.0), 2) == (1.0, 2.0, 4.0)
