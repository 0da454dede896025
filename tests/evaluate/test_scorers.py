"""Each score is what its description says, recomputed here by other means; what can't be scored is refused with a reason."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.errors import DataError, RecipeError
from finetune.evaluate.scorers import SCORES, fitting_score, json_score, number_score, scorer

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=4,
)
OBJECTS = st.dictionaries(st.text("abc", min_size=1, max_size=2), VALUES, min_size=1, max_size=5)


def value(name, expected, answer, **options):
    return scorer(name, **options).score_answer("prompt", expected, answer).score


@pytest.mark.parametrize(
    ("name", "expected", "answer", "score"),
    [("exact", "a b ", " a b", 1), ("exact", "a", "A", 0), ("contains", "Paris", "Paris!", 1), ("contains", "Paris", "", 0),
     ("regex", r"^\d+ parcels?$", "So:\n3 parcels", 1), ("regex", r"^\d+ parcels?$", "parcels", 0),
     ("numeric", "42", "It is 42.", 1), ("numeric", "-0.5", "x = -.5", 1), ("numeric", "1,234.5", "$1234.50", 1),
     ("numeric", "7", "7 of 8", 0), ("numeric", "5", "", 0), ("numeric", "10", "1e1", 1), ("numeric", "8", "1e999", 0)],
)  # fmt: skip
def test_scores_of_texts_and_numbers(name, expected, answer, score):
    assert value(name, expected, answer) == score


def test_a_pattern_compares_what_it_finds():
    pattern = r"#### (-?\d+)"
    assert value("regex", "2 + 2\n#### 4", "so #### 4", pattern=pattern) == 1
    assert value("regex", "#### 4", "#### 5", pattern=pattern) == value("regex", "#### 4", "4", pattern=pattern) == 0
    with pytest.raises(DataError, match="finds nothing"):
        value("regex", "4", "#### 4", pattern=pattern)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.sampled_from([0.0, 0.01, 0.5]))
def test_a_tolerance_is_relative_to_the_expected_number(expected, answer, tolerance):
    is_close = abs(answer - expected) <= tolerance * (abs(expected) if expected else 1)
    assert number_score(repr(expected), f"about {answer!r}", tolerance).score == is_close


@settings(max_examples=30)
@given(OBJECTS, OBJECTS)
def test_json_fields_are_counted_one_by_one(expected, answer):
    row_score = json_score(json.dumps(expected), json.dumps(answer))
    equal_fields = {
        name for name in expected if json.dumps(answer.get(name, object), default=str) == json.dumps(expected[name])
    }
    assert {name for name, is_right in row_score.fields.items() if is_right} == equal_fields
    assert row_score.score == len(equal_fields) / len({*expected, *answer}) and row_score.valid


def test_json_of_any_kind_is_valid_or_not_and_no_score_fails_on_odd_answers():
    right = '{"a": {"b": 1, "c": [1, true]}, "d": 1.0}'
    assert json_score(right, '{"d": 1, "a": {"c": [1, true], "b": 1.0}}').score == 1
    assert json_score(right, '{"d": true, "a": {"c": [1, 1], "b": 1}}').fields == {"a.b": True, "a.c": False, "d": False}
    for answer in ["", "{", "NaN", '{"a": Infinity}', "[" * 100_000, "9" * 5000, '```json\n{"d": 1}\n```', "\ud800"]:
        assert (json_score(right, answer).score, json_score(right, answer).valid) == (0, False), answer[:20]
    assert (json_score(right, "[]").valid, json_score("[1]", "[1.0]").score, json_score("{}", "{}").score) == (True, 1, 1)
    with pytest.raises(DataError, match="not JSON"):
        json_score("plain", "{}")
    rng = random.Random(0)
    for _ in range(300):
        answer = "".join(rng.choice('{}[]",:0159.eE+-\\\x00\u202e\ud800é ') for _ in range(rng.randrange(30)))
        for name in SCORES:
            assert 0 <= value(name, "1", answer) <= 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [("exakt", {}, "no score"), ("exact", {"pattern": "a"}, "--pattern"), ("json", {"tolerance": 1.0}, "--tolerance"),
     ("numeric", {"tolerance": -1.0}, "0 or more"), ("numeric", {"tolerance": float("nan")}, "0 or more"),
     ("regex", {"pattern": "("}, "not a regular expression"), ("x:f", {}, "not file.py:name"),
     ("none.py:f", {}, "no file"), ("bad.py:f", {}, "can't be imported"),
     ("leave.py:f", {}, "SystemExit"), ("good.py:missing", {}, "no function"), ("good.py:loss", {}, "a score of finetune")],
)  # fmt: skip
def test_what_can_not_be_a_score_is_refused(home, name, options, message):
    (home / "bad.py").write_text("1 / 0")
    (home / "leave.py").write_text("raise SystemExit(0)")
    (home / "good.py").write_text("x = 1")
    with pytest.raises(RecipeError, match=message):
        scorer(name, **options)


def test_a_users_function_scores_and_its_errors_are_reported(home):
    (home / "own.py").write_text(
        "def share(prompt, expected, answer):\n    return len(set(answer) & set(expected)) / len(set(expected))\n"
        "def fails(prompt, expected, answer):\n    return [][0]\n"
        "def words(prompt, expected, answer):\n    return 'good'\n"
        "def huge(prompt, expected, answer):\n    return float('inf')\n"
    )
    assert value("own.py:share", "abcd", "abx") == 0.5
    for name, message in {"fails": "IndexError", "words": "'good'", "huge": "'inf'"}.items():
        with pytest.raises(RecipeError, match=message):
            value(f"own.py:{name}", "a", "b")


@pytest.mark.parametrize(
    ("answers", "score"),
    [(['{"a": 1}', "{}"], "json"), (['{"a": 1}', "7"], "exact"), ([], "loss"),
     (["Thank you. " * 9, "Yes.", "first line\nsecond line"], "tokens")],
)  # fmt: skip
def test_the_score_is_chosen_by_the_expected_answers(answers, score):
    assert fitting_score(answers)[0] == score
