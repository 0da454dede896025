"""Small pictures: texts are escaped, gaps break lines. Series: spikes and gaps stay, appending changes nothing before."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app import live as series_module
from app.draft import card_label
from app.live import Series, smoothed
from app.views.charts import Line, histogram, sparkline, svg_chart
from app.views.markup import Safe, inert, plain, table
from finetune.card.find import catalogue, catalogue_sizes

HOSTILE = "<img src=x onerror=alert(1)>\"'&\x1b[31m‮"


def drawn(*points):
    return svg_chart("Loss", [Line("loss", points, "loss")], "{:.2f}".format)


def parsed(text):
    return ElementTree.fromstring(f"<root>{text}</root>")


def test_a_gap_breaks_the_line_flat_and_huge_values_stay_inside_the_picture_and_an_empty_run_is_no_error():
    text = drawn((1.0, 1.0), (2.0, 2.0), (2.5, None), (3.0, 3.0), (3.5, None), (4.0, 1.0), (5.0, 2.0))
    assert len(re.findall("<polyline", text)) == 3
    for points in ([(1.0, 5.0), (2.0, 5.0)], [(1.0, 1e-12), (2.0, 1e12)], [(0.0, 0.0), (1.0, 0.0)]):
        heights = [float(part.split(",")[1]) for part in re.findall(r"[\d.]+,-?[\d.]+", drawn(*points))]
        assert heights and all(0 <= height <= 100 for height in heights)
    assert drawn() == drawn((1.0, None)) == "" and not histogram([], None)
    assert parsed(sparkline([], "no step yet")) is not None


def test_texts_of_pictures_and_tables_are_inert_unless_made_here_and_keep_lines_without_escape_sequences():
    text = svg_chart(HOSTILE, [Line(HOSTILE, [(1.0, 1.0), (2.0, 2.0)], "loss")], lambda value: HOSTILE)
    assert {element.tag for element in parsed(text).iter()}.isdisjoint({"img", "script"})
    assert "\x1b" not in text and "‮" not in text
    text = table([HOSTILE, ">b"], [[HOSTILE, Safe("<b>ours</b>")]], HOSTILE)
    tags = [element.tag for element in parsed(text).iter()]
    assert "img" not in tags
    assert tags.count("b") == 1
    assert plain("a\x1b[2J\x1b]0;title\x07b\nc\td\x00\x9b") == "ab\nc\td"
    assert inert("x" * 50, 10) == "xxxxxxxxx…"


def test_a_histogram_marks_rows_over_the_limit():
    bars = histogram([10] * 5 + [95] * 2, 50)["heights"]
    assert len(bars) == 40 and (100, False) in bars and (40, True) in bars and (40, False) not in bars


def test_each_card_of_the_catalogue_can_be_chosen_by_a_label_of_its_own():
    labels = {(card_label(name), size) for name, size in catalogue_sizes().items()}
    assert len(labels) == len(catalogue()) and labels > {("RTX 4090", 24), ("RTX 3080 Laptop", 8)}


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
def test_lowest_and_highest_first_and_last_value_stay_and_a_missing_value_is_counted_and_leaves_a_gap(values):
    series, finite = filled(values), [value for value in values if isinstance(value, float)]
    bins = [part for part in series.bins.values() if part.count]
    ends = (series.lowest_bin.low, max(part.high for part in bins), series.first, series.last) if finite else None
    assert ends == ((min(finite), max(finite), finite[0], finite[-1]) if finite else None)
    assert sum(part.count for part in bins) == len(finite)
    assert sum(part.missing for part in series.bins.values()) == len(values) - len(finite)
    gaps = [step for step, value in series.points(highest=True) if value is None]
    assert gaps == [step for step, value in series.points() if value is None]
    assert len(gaps) == sum(not part.count for part in series.bins.values())


@given(VALUES, st.integers(1, 399))
@settings(deadline=None)
def test_appending_leaves_earlier_bins_as_they_are(values, cut):
    before, after = filled(values[:cut]), filled(values)
    for index, part in before.bins.items():
        ended = (index + 1) * before.width <= cut
        if ended and before.width == after.width:
            assert after.bins[index] == part


@given(st.permutations(range(1, 60)))
@settings(deadline=None)
def test_the_order_in_which_steps_come_does_not_matter(order):
    series, straight = Series(), filled([float(step) for step in range(1, 60)])
    for step in order:
        series.add(step, float(step))
    assert {**series.bins} == straight.bins


def test_smoothing_begins_at_the_first_value_and_keeps_gaps():
    points = [(1.0, 4.0), (2.0, None), (3.0, 4.0)]
    assert smoothed(points, 0.9) == [(1.0, pytest.approx(4.0)), (2.0, None), (3.0, pytest.approx(4.0))]
    assert smoothed([(1.0, 1.0), (2.0, 3.0)], 0.0) == [(1.0, 1.0), (2.0, 3.0)]
