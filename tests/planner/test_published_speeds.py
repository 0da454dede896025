"""The speed model beside tokens per second that others published; benchmarks/speed_accuracy.py prints all rows."""

import statistics

import pytest

import speed_accuracy as accuracy

ROWS = accuracy.REFERENCE / "published_speed.csv"
T4 = "t4"


@pytest.mark.slow
def test_steps_on_a_t4_take_the_measured_time_and_plans_are_in_the_measured_order():
    """35 rows: 16 bit and NF4, sdpa and eager. By published rates: 2.1 times too fast, half of the pairs in the wrong order."""
    rows, by_published_rates = (
        [row for row in accuracy.read_rows(ROWS, published_rates) if row.gpu == T4] for published_rates in (False, True)
    )
    assert len(rows) == 35
    for base, attention in {(row.base.label, row.attention) for row in rows}:
        ratios = [row.ratio for row in rows if (row.base.label, row.attention) == (base, attention)]
        assert 0.8 < statistics.median(ratios) < 1.25, (base, attention)
    assert 1 / 2.1 < accuracy.worst([row.ratio for row in rows]) < 2.1
    assert all(accuracy.in_order(*pair) for pair in accuracy.pairs(rows))
    assert statistics.median(row.ratio for row in by_published_rates) > 1.8
    assert not all(accuracy.in_order(*pair) for pair in accuracy.pairs(by_published_rates))
