"""Random recipes at the edge of their GPU: where a budget lies, and which recipes are left."""

import dataclasses
from types import SimpleNamespace

import pytest

from benchmarks.card_edge import ABOVE, BETWEEN, random_recipe, read_results, write_results

LOW, HIGH = 10 * 2**30, 12 * 2**30
ENDS = SimpleNamespace(peak_low_bytes=LOW, peak_high_bytes=HIGH)


def budget_at(position):
    return dataclasses.replace(random_recipe(0), budget_position=position).budget_bytes(ENDS)


def test_a_seed_gives_one_recipe():
    assert random_recipe(7) == random_recipe(7) != random_recipe(8)


@pytest.mark.parametrize("position", [0.0, ABOVE - 0.001])
def test_a_budget_above_the_forecast_is_within_1_percent(position):
    assert HIGH < budget_at(position) < 1.011 * HIGH


@pytest.mark.parametrize("position", [ABOVE, BETWEEN - 0.001])
def test_a_budget_between_the_ends_is_between(position):
    assert LOW <= budget_at(position) < HIGH


@pytest.mark.parametrize("position", [BETWEEN + 0.001, 1.0])
def test_a_budget_below_the_forecast_is_within_3_percent(position):
    assert 0.97 * LOW <= budget_at(position) < LOW


def test_results_are_read_by_seed(tmp_path):
    path = tmp_path / "edge.csv"
    assert read_results(path) == {}
    write_results(path, {seed: {"seed": seed, "verdict": "fits", "outcome": "finished"} for seed in (12, 3)})
    assert list(read_results(path)) == [3, 12] and read_results(path)[3]["outcome"] == "finished"
