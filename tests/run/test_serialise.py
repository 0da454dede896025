"""A dataclass written as JSON and read back by its types is the same value."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest

from finetune.card.card import Card
from finetune.files import from_json, parse_leniently, to_json
from finetune.memory.forecast import Forecast
from finetune.recipe import load_recipe
from finetune.settings.schema import Recipe


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outer:
    verdict: Literal["fits", "tight"]
    inner: Inner | None = None
    rows: list[Inner] = field(default_factory=list)
    by_name: dict[str, Inner] = field(default_factory=dict)
    pair: tuple[int, int] | None = None
    loss: float | None = None


WHOLE = Outer("fits", Inner("a", (1, 2)), [Inner("b")], {"c": Inner("d", (3,))}, (8, 9), 0.5)


@pytest.mark.parametrize("value", [WHOLE, Outer("tight")])
def test_nested_values_come_back(value):
    assert from_json(Outer, json.loads(json.dumps(to_json(value)))) == value


def test_the_projects_own_values_come_back_paths_are_text_and_every_fault_is_named():
    card = Card("x", 2, 1, capability=(8, 9), context_bytes=5)
    forecast = Forecast(1, 2, 3, 4, 5, {"weights": 1}, {"train": 1}, step_s=0.5, notes=("a", "b"))
    recipe = load_recipe("tiny-cpu")
    for kind, value in ((Card, card), (Forecast, forecast), (Recipe, recipe)):
        assert from_json(kind, json.loads(json.dumps(to_json(value)))) == value
    assert to_json((Path("a") / "b",)) == ["a/b"]
    assert from_json(Inner, {"name": "a", "news": 1}) == Inner("a")
    with pytest.raises(ValueError, match="verdict: .*'fits' or 'tight'.*inner.name: Field required.*pair.0: "):
        from_json(Outer, {"verdict": "never", "inner": {}, "pair": ["x", 1]})


@pytest.mark.parametrize(("value", "text"), [(math.inf, "inf"), (-math.inf, "-inf"), (math.nan, "nan")])
def test_numbers_that_json_has_not_are_text_on_the_way(value, text):
    as_json = to_json({"nested": [value], "at": Outer("fits", loss=value)})
    assert (as_json["nested"], as_json["at"]["loss"]) == ([text], text)
    assert repr(from_json(Outer, as_json["at"]).loss) == repr(value)


def test_what_can_be_read_of_a_damaged_line_is_kept():
    assert parse_leniently(Outer, b'{"verdict": "fits", "loss": {}, "pair": [1]}') == Outer("fits")


@pytest.mark.parametrize(
    "line", [b'{"verdict": 5, "loss": 1}', b"{", b"", b"[]", b"5", b"\xff", b"[" * 100_000, b'{"verdict": "\xff"}']
)
def test_a_line_without_what_is_needed_is_nothing(line):
    assert parse_leniently(Outer, line) is None
