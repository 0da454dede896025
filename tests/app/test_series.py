"""The series on the page: spikes and gaps stay, appending changes nothing before, the size is bounded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.views import series as series_module
from app.views.series import Series, smoothed

VALUES = st.lists(st.one_of(st.floats(-1e6, 1e6), st.none(), st.just("nan")), min_size=1, max_size=400)


def filled(values):
    series = Series()
    for step, value in enumerate(values, 1):
        series.add(step, value)
    return series


@pytest.fixture(autouse=True, scope="module")
def few_bins():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(series_module, "MOST_BINS", 16)
        yield


@given(VALUES)
@settings(deadline=None)
def test_lowest_and_highest_first_and_last_value_stay(values):
    series, finite = filled(values), [(step, value) for step, value in enumerate(values, 1) if isinstance(value, float)]
    bins = [part for part in series.bins.values() if part.count]
    numbers = [value for _, value in finite]
    ends = (series.low, max(part.high for part in bins), series.first, series.last) if finite else None
    assert ends == ((min(numbers), max(numbers), numbers[0], numbers[-1]) if finite else None)
    assert sum(part.count for part in bins) == len(finite)


@given(VALUES, st.integers(1, 399))
@settings(deadline=None)
def test_appending_leaves_earlier_bins_as_they_are(values, cut):
    before, after = filled(values[:cut]), filled(values)
    for index, part in before.bins.items():
        ended = (index + 1) * before.width <= cut
        if ended and before.width == after.width:
            assert after.bins[index] == part


@given(VALUES)
@settings(deadline=None)
def test_a_value_that_is_missing_is_counted_and_leaves_a_gap(values):
    series = filled(values)
    assert sum(part.missing for part in series.bins.values()) == sum(not isinstance(value, float) for value in values)
    gaps = [step for step, value in series.points(highest=True) if value is None]
    assert gaps == [step for step, value in series.points() if value is None]
    assert len(gaps) == sum(not part.count for part in series.bins.values())


@given(st.permutations(range(1, 60)))
@settings(deadline=None)
def test_the_order_in_which_steps_come_does_not_matter(order):
    series, straight = Series(), filled([float(step) for step in range(1, 60)])
    for step in order:
        series.add(step, float(step))
    assert {**series.bins} == straight.bins


def test_a_single_spike_in_a_long_run_is_kept_in_bounded_memory():
    values = [1.0] * 50_000
    values[31_415] = 99.0
    series = filled(values)
    assert 8 <= len(series.bins) <= 16 and series.bins[31_416 // series.width].high == 99.0


def test_smoothing_begins_at_the_first_value_and_keeps_gaps():
    points = [(1.0, 4.0), (2.0, None), (3.0, 4.0)]
    assert smoothed(points, 0.9) == [(1.0, pytest.approx(4.0)), (2.0, None), (3.0, pytest.approx(4.0))]
    assert smoothed([(1.0, 1.0), (2.0, 3.0)], 0.0) == [(1.0, 1.0), (2.0, 3.0)]
