"""How an answer is scored against the expected one: exactly, by what it contains, as JSON, as a number, or by a function."""

from __future__ import annotations

import importlib.util
import json
import math
import numbers
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import CommandError, DataError

#: Scores by name, and what one row's score is.
SCORES = {
    "exact": "1 where the answer is the expected one",
    "contains": "1 where the answer contains the expected one",
    "regex": "1 where --pattern finds in the answer what it finds in the expected one; without it, that one is the pattern",
    "json": "share of the expected JSON's fields that the answer has with the same value; others in the answer count as wrong",
    "numeric": "1 where the answer's last number is the expected one within --tolerance",
    "loss": "no answers: loss, perplexity and token accuracy only",
}
_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_LONGEST_NUMBER = 400  # characters; float() takes any number of digits


@dataclass(frozen=True)
class Marked:
    """The score of one answer. `fields`: of JSON, whether each expected field is right; `valid`: whether it is JSON at all."""

    score: float
    fields: Mapping[str, bool] = field(default_factory=dict)
    valid: bool | None = None


@dataclass(frozen=True)
class Scorer:
    """A way to score. `mark(prompt, expected, answer)`; `span`: the largest difference of two scores, None if unknown."""

    name: str
    mark: Callable[[str, str, str], Marked]
    span: float | None = 1.0


def scorer(name: str, *, pattern: str | None = None, tolerance: float = 0.0, function: str | None = None) -> Scorer:
    """The score called `name`, or that of `function` (file.py:name). Raises CommandError for what can't be used."""
    if function is not None:
        return Scorer(function.rpartition(":")[2], _by_function(function), None)
    if name not in SCORES:
        raise CommandError(f"there is no score {name[:60]!r}", f"Use one of {', '.join(SCORES)}, or --score-function.")
    if pattern is not None and name != "regex":
        raise CommandError(f"--pattern belongs to --score regex, not to {name}", "Add --score regex.")
    if tolerance and name != "numeric":
        raise CommandError(f"--tolerance belongs to --score numeric, not to {name}", "Add --score numeric.")
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise CommandError(f"--tolerance is {tolerance}; it must be 0 or more", "For 1 %: --tolerance 0.01")
    ways: dict[str, Callable[[str, str, str], Marked]] = {
        "exact": lambda _, expected, answer: Marked(float(answer.strip() == expected.strip())),
        "contains": lambda _, expected, answer: Marked(float(expected.strip() in answer)),
        "regex": _by_pattern(pattern),
        "json": lambda _, expected, answer: as_json(expected, answer),
        "numeric": lambda _, expected, answer: as_number(expected, answer, tolerance),
        "loss": lambda *_: Marked(0.0),
    }
    return Scorer(name, ways[name])


def as_json(expected: str, answer: str) -> Marked:
    """Field by field; fields of nested objects are named a.b, lists are compared as a whole. Raises DataError."""
    wanted = _parsed(expected)
    if wanted is _NONE:
        raise DataError(f"the expected answer is not JSON: {expected[:100]!r}", "Use another --score for these rows.")
    made = _parsed(answer)
    if not isinstance(wanted, dict) or not wanted:
        return Marked(float(_same(wanted, made)), {}, made is not _NONE)
    right, leaves = dict(_leaves(wanted)), dict(_leaves(made)) if isinstance(made, dict) else {}
    fields = {name: name in leaves and _same(value, leaves[name]) for name, value in right.items()}
    return Marked(sum(fields.values()) / len({*right, *leaves}), fields, made is not _NONE)


def as_number(expected: str, answer: str, tolerance: float) -> Marked:
    """Whether the last numbers agree: relative to the expected one, absolute where that is 0. Raises DataError."""
    wanted, made = _last_number(expected), _last_number(answer)
    if wanted is None:
        raise DataError(f"the expected answer has no number: {expected[:100]!r}", "Use another --score for these rows.")
    return Marked(float(made is not None and abs(made - wanted) <= tolerance * (abs(wanted) or 1.0)))


def _by_pattern(pattern: str | None) -> Callable[[str, str, str], Marked]:
    if pattern is None:
        return lambda _, expected, answer: Marked(float(_compiled(expected.strip()).search(answer) is not None))
    search = _compiled(pattern).search

    def mark(_: str, expected: str, answer: str) -> Marked:
        wanted, made = search(expected), search(answer)
        if wanted is None:
            raise DataError(f"the pattern finds nothing in the expected answer {expected[:100]!r}", "Change --pattern.")
        return Marked(float(made is not None and _found(made) == _found(wanted)))

    return mark


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.MULTILINE)
    except (re.error, RecursionError, OverflowError) as error:
        problem = f"{pattern[:100]!r} is not a regular expression: {error}"
        raise CommandError(problem, r"For example --pattern '#### (\d+)'") from None


def _found(match: re.Match[str]) -> Any:
    """The groups of a match, or all of it without groups."""
    return match.groups() or match[0]


class _None:
    """Stands for text that is not JSON."""


_NONE = _None()


def _parsed(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return _NONE


def _leaves(value: dict[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, inner in value.items():
        place = f"{before}{name}"
        found += _leaves(inner, f"{place}.") if isinstance(inner, dict) and inner else [(place, inner)]
    return found


def _same(one: Any, other: Any) -> bool:
    """Equal JSON values: 1 is 1.0, but true is not 1."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    return bool(one == other)


def _last_number(text: str) -> float | None:
    numbers_in = _NUMBER.findall(text)
    if not numbers_in or len(numbers_in[-1]) > _LONGEST_NUMBER:
        return None
    value = float(numbers_in[-1].replace(",", ""))
    return value if math.isfinite(value) else None


def _by_function(source: str) -> Callable[[str, str, str], Marked]:
    """The user's function of prompt, expected answer and answer, called for each row."""
    function = _function(source)

    def mark(prompt: str, expected: str, answer: str) -> Marked:
        try:
            value = function(prompt, expected, answer)
        except (Exception, SystemExit) as error:
            raise CommandError(f"{source} failed for the answer {answer[:100]!r}: {type(error).__name__}: {error}") from error
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise CommandError(
                f"{source} returned {str(value)[:60]!r} for the answer {answer[:100]!r}", "Return a number, True or False."
            )
        return Marked(float(value))

    return mark


def _function(source: str) -> Callable[[str, str, str], Any]:
    file, _, name = source.rpartition(":")
    example = "For example --score-function score.py:score, with  def score(prompt, expected, answer):"
    if not file.endswith(".py") or not name.isidentifier():
        raise CommandError(f"{source[:200]!r} is not file.py:name", example)
    if not Path(file).is_file():
        raise CommandError(f"there is no file {file}", example)
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise CommandError(f"{file} can't be imported: {type(error).__name__}: {error}", "Correct the file.") from error
    found = getattr(module, name, None)
    if not callable(found):
        raise CommandError(f"{file} has no function {name}", example)
    return found  # type: ignore[no-any-return]
