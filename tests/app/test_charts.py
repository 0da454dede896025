"""Charts: texts are escaped, gaps break lines, levels that would flatten the curve are in the legend only."""

import re
import xml.etree.ElementTree as ElementTree

from app.planning.catalogue import card_choices
from app.views.charts import Level, Line, Mark, Panel, chart, histogram, sparkline
from app.views.markup import Safe, inert, plain, table
from finetune.card.find import catalogue

HOSTILE = "<img src=x onerror=alert(1)>\"'&\x1b[31m‮"


def drawn(panels, marks=(), last=100):
    return chart(panels, list(marks), last, "in words")


def parsed(text):
    return ElementTree.fromstring(f"<root>{text}</root>")


def panel(points, levels=(), **more):
    return Panel("Loss", [Line("loss", points, "loss")], lambda value: f"{value:.2f}", levels, **more)


def test_a_gap_breaks_the_line():
    text = drawn([panel([(1.0, 1.0), (2.0, 2.0), (2.5, None), (3.0, 3.0), (4.0, 1.0)])])
    assert len(re.findall("<polyline", text)) == 2


def test_a_value_between_two_gaps_is_a_dot():
    assert len(re.findall('class="loss dot"', drawn([panel([(1.0, None), (2.0, 2.0), (3.0, None)])]))) == 1


def test_a_level_far_above_is_named_and_does_not_flatten_the_curve():
    text = drawn([panel([(1.0, 1.0), (2.0, 2.0)], [Level("card", 100.0, "card"), Level("forecast", 2.2, "forecast")])])
    assert "card 100.00 (above the chart)" in text
    assert text.count('<line class="card level"') == 0
    assert text.count('<line class="forecast level"') == 1


def test_marks_are_drawn_in_every_panel_at_the_same_place():
    text = drawn([panel([(1.0, 1.0), (100.0, 2.0)]), panel([(1.0, 5.0), (100.0, 6.0)])], [Mark("save", 50, "save")])
    assert text.count('x1="500.0"') == 2


def test_an_empty_run_is_drawn_without_an_error():
    assert "<figure" in drawn([panel([])], last=0)
    assert parsed(sparkline([], "no step yet")) is not None
    assert histogram([], None, "none") == ""


def test_flat_and_huge_values_stay_inside_the_picture():
    for points in ([(1.0, 5.0), (2.0, 5.0)], [(1.0, 1e-12), (2.0, 1e12)], [(0.0, 0.0), (1.0, 0.0)]):
        heights = [float(part.split(",")[1]) for part in re.findall(r"[\d.]+,-?[\d.]+", drawn([panel(points)]))]
        assert heights
        assert all(0 <= height <= 100 for height in heights)


def test_every_text_in_a_chart_is_inert():
    evil = Panel(
        HOSTILE, [Line(HOSTILE, [(1.0, 1.0), (2.0, 2.0)], "loss")], lambda value: HOSTILE, [Level(HOSTILE, 2.0, "card")]
    )
    text = chart([evil], [Mark(HOSTILE, 1, "save")], 2, HOSTILE)
    assert {element.tag for element in parsed(text).iter()}.isdisjoint({"img", "script"})
    assert "\x1b" not in text and "‮" not in text


def test_table_cells_are_inert_unless_made_here():
    text = table([HOSTILE, ">b"], [[HOSTILE, Safe("<b>ours</b>")]], HOSTILE)
    tags = [element.tag for element in parsed(text).iter()]
    assert "img" not in tags
    assert tags.count("b") == 1


def test_plain_text_has_no_escape_sequences_and_keeps_lines():
    assert plain("a\x1b[2J\x1b]0;title\x07b\nc\td\x00\x9b") == "ab\nc\td"
    assert inert("x" * 50, 10) == "xxxxxxxxx…"


def test_a_histogram_marks_rows_over_the_limit():
    text = histogram([10] * 5 + [95] * 2, 50, "words")
    assert text.count('class="over"') == 1
    assert 'class="level budget"' in text


def test_the_first_card_that_contains_a_cards_name_is_that_card():
    choices = card_choices()
    assert len({label for label, _ in choices}) == len(choices) == len(catalogue())
    for _, name in choices:
        typed = name.removeprefix("rtx-").replace("-", " ")
        assert [card for label, card in choices if typed in label.lower()][:1] in ([name], []), name
    assert ("RTX 4090 · 24 GB", "rtx-4090") in choices and ("RTX 3080 Laptop · 8 GB", "rtx-3080-laptop-8gb") in choices
