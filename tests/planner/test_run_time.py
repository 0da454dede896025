"""The length of a run as a range from whole runs that were measured here."""

import math
import random

import pytest

from finetune.planner.run_time import MeasuredRun, run_time


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
