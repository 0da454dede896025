"""Retries end a run on a GPU with half of the memory that the run was planned for."""

import csv

import pytest

pytestmark = [pytest.mark.standin, pytest.mark.slow]


def test_a_retry_takes_the_first_smaller_plan_that_is_forecast_to_fit(standin, tmp_path):
    output = tmp_path / "end.csv"
    standin().run("warm python", "-m", "benchmarks.card_end", "--only", "NF4 | smaller by 50%", "--output", output)
    (line,) = csv.DictReader(output.open())
    assert line["outcome"] == "finished"
    assert line["changes"].count("{") == 2  # one attempt that was out of memory, one retry made smaller by the forecast
