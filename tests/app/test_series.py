"""The series on the page: spikes and gaps stay, appending changes nothing before, the size is bounded."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.views.series import MOST_BINS, Series, smoothed

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.none(), st.just("nan")), min_size=1, max_size=400)


def filled(values, most_bins=MOST_BINS):
    series = Series(most_bins)
    for step, value in enumerate(values, 1):
        series.add(step, value)
    return series


def numbers(values):
    return [value for value in values if isinstance(value, float)]


@given(VALUES)
@settings(deadline=None)
def test_lowest_and_highest_value_are_always_drawn(values):
    drawn = [value for _, value in filled(values, 16).points() if value is not None]
    finite = numbers(values)
    assert (min(drawn), max(drawn)) == (min(finite), max(finite)) if finite else not drawn


@given(VALUES)
@settings(deadline=None)
def test_first_and_last_value_are_always_drawn(values):
    finite = [(float(step), value) for step, value in enumerate(values, 1) if isinstance(value, float)]
    drawn = [point for point in filled(values, 16).points() if point[1] is not None]
    if finite:
        assert (drawn[0], drawn[-1]) == (finite[0], finite[-1])


@given(VALUES, st.integers(1, 399))
@settings(deadline=None)
def test_appending_leaves_earlier_bins_as_they_are(values, cut):
    before, after = filled(values[:cut], 16), filled(values, 16)
    for index, part in before.bins.items():
        ended = (index + 1) * before.width <= cut
        if ended and before.width == after.width:
            assert after.bins[index] == part


@given(VALUES)
@settings(deadline=None)
def test_a_value_that_is_missing_leaves_a_gap(values):
    gaps = [step for step, value in filled(values).points() if value is None]
    missing = [step for step, value in enumerate(values, 1) if not isinstance(value, float)]
    assert [math.floor(step) for step in gaps] == missing


@given(VALUES)
@settings(deadline=None)
def test_what_is_kept_on_disk_reads_back_the_same(values):
    import json

    series = filled(values, 16)
    restored = Series.from_json(json.loads(json.dumps(series.as_json())))
    assert (restored.points(), restored.means(), restored.last, restored.width) == (
        series.points(),
        series.means(),
        series.last,
        series.width,
    )


@given(st.permutations(range(1, 60)))
@settings(deadline=None)
def test_the_order_in_which_steps_come_does_not_matter(order):
    series, straight = Series(16), filled([float(step) for step in range(1, 60)], 16)
    for step in order:
        series.add(step, float(step))
    assert series.bins.keys() == straight.bins.keys()
    assert [(part.low, part.high, part.count) for _, part in sorted(series.bins.items())] == [
        (part.low, part.high, part.count) for _, part in sorted(straight.bins.items())
    ]


@pytest.mark.parametrize("missing_every", [None, 2, 97])
def test_a_hundred_thousand_steps_give_at_most_two_thousand_points(missing_every):
    series = filled([None if missing_every and step % missing_every == 0 else math.sin(step) for step in range(100_000)])
    assert 600 < len(series.points()) <= 2000


def test_a_single_spike_in_a_long_run_is_drawn():
    values = [1.0] * 50_000
    values[31_415] = 99.0
    assert (31_416.0, 99.0) in filled(values).points()


def test_smoothing_begins_at_the_first_value_and_keeps_gaps():
    points = [(1.0, 4.0), (2.0, None), (3.0, 4.0)]
    assert smoothed(points, 0.9) == [(1.0, pytest.approx(4.0)), (2.0, None), (3.0, pytest.approx(4.0))]
    assert smoothed([(1.0, 1.0), (2.0, 3.0)], 0.0) == [(1.0, 1.0), (2.0, 3.0)]
