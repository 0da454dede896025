"""Small pictures: texts are escaped, gaps break lines, and an empty run is no error. Texts of tables are inert."""

import re
import xml.etree.ElementTree as ElementTree

from app.planning.catalogue import card_choices
from app.views.charts import Line, histogram, picture, sparkline
from app.views.markup import Safe, inert, plain, table
from finetune.card.find import catalogue

HOSTILE = "<img src=x onerror=alert(1)>\"'&\x1b[31m‮"


def drawn(*points):
    return picture("Loss", [Line("loss", points, "loss")], "{:.2f}".format)


def parsed(text):
    return ElementTree.fromstring(f"<root>{text}</root>")


def test_a_gap_breaks_the_line_and_a_value_between_two_gaps_is_drawn():
    text = drawn((1.0, 1.0), (2.0, 2.0), (2.5, None), (3.0, 3.0), (3.5, None), (4.0, 1.0), (5.0, 2.0))
    assert len(re.findall("<polyline", text)) == 3


def test_an_empty_run_is_drawn_without_an_error():
    assert drawn() == drawn((1.0, None)) == "" == histogram([], None, "none")
    assert parsed(sparkline([], "no step yet")) is not None


def test_flat_and_huge_values_stay_inside_the_picture():
    for points in ([(1.0, 5.0), (2.0, 5.0)], [(1.0, 1e-12), (2.0, 1e12)], [(0.0, 0.0), (1.0, 0.0)]):
        heights = [float(part.split(",")[1]) for part in re.findall(r"[\d.]+,-?[\d.]+", drawn(*points))]
        assert heights and all(0 <= height <= 100 for height in heights)


def test_every_text_in_a_picture_is_inert():
    text = picture(HOSTILE, [Line(HOSTILE, [(1.0, 1.0), (2.0, 2.0)], "loss")], lambda value: HOSTILE)
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
    bars = re.findall('<i class="(.*?)" style="height:(.*?)%">', histogram([10] * 5 + [95] * 2, 50, "words"))
    assert len(bars) == 40 and ("", "100.0") in bars and ("over", "40.0") in bars and ("", "40.0") not in bars


def test_each_card_of_the_catalogue_can_be_chosen_by_a_label_of_its_own():
    choices = card_choices()
    assert len({label for label, _ in choices}) == len(choices) == len(catalogue())
    assert ("RTX 4090 · 24 GB", "rtx-4090") in choices and ("RTX 3080 Laptop · 8 GB", "rtx-3080-laptop-8gb") in choices
