"""Score an answer against the expected answer: as text, pattern, JSON or number, by its tool calls, or by a function."""

from __future__ import annotations

import json
import math
import numbers
import re
import runpy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.errors import CommandError, DataError

if TYPE_CHECKING:  # --help imports this module
    from finetune.data.tool_calls import Answer, Call

#: Described in docs/after-training.md.
SCORES = ("exact", "contains", "regex", "json", "numeric", "calls", "tokens", "loss")
#: A number, also with a sign, thousands separators, decimals or an exponent.
_NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
TOKEN_ACCURACY = "token accuracy"  # the name of the score `tokens`
#: Longer answers, and answers of several lines, are free text, which no model writes to the letter.
_MAX_SHORT_ANSWER = 60  # characters
_MAX_NUMBER = 400  # characters; float() takes any number of digits
#: Parts of the score of calls, each over the rows that it is about.
NO_CALL_DUE, NAMES, ARGUMENTS, COUNT, ORDER, KNOWN_TOOL = (
    "no call where none is due", "names", "arguments", "number of calls", "order of calls", "only tools that are offered",
)  # fmt: skip


@dataclass(frozen=True)
class RowScore:
    """The score of one answer."""

    score: float
    #: Whether each expected field of JSON, or part of a score of calls, is right.
    fields: Mapping[str, bool] = field(default_factory=dict)
    valid: bool | None = None  # whether the answer is JSON, or its calls can be read


#: Called with prompt, expected answer and answer.
ScoreAnswer = Callable[[str, str, str], RowScore]


@dataclass(frozen=True)
class Scorer:
    """A kind of score."""

    name: str
    score_answer: ScoreAnswer


def score_range(name: str, *scores: Sequence[float]) -> float:
    """Return the largest possible difference of two scores; for a user's function the largest seen."""
    all_scores = [score for model_scores in scores for score in model_scores]
    is_share = name in SCORES and min(all_scores, default=0) >= 0 and max(all_scores, default=0) <= 1
    return 1.0 if is_share else max(all_scores) - min(all_scores)


def scorer(name: str, *, pattern: str | None = None, tolerance: float = 0.0) -> Scorer:
    """Return the score called `name`, or a user's file.py:name. Raise CommandError."""
    if ":" in name:
        return Scorer(name.rpartition(":")[2], _by_function(name))
    if name not in SCORES:
        raise CommandError(f"there is no score {name[:60]!r}", f"Use one of {', '.join(SCORES)}, or FILE.py:FUNCTION.")
    if pattern is not None and name != "regex":
        raise CommandError(f"--pattern works with --score regex, not with {name}", "Add --score regex.")
    if tolerance and name != "numeric":
        raise CommandError(f"--tolerance works with --score numeric, not with {name}", "Add --score numeric.")
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise CommandError(f"--tolerance is {tolerance}; it must be 0 or more", "For 1 %: --tolerance 0.01")
    functions: dict[str, ScoreAnswer] = {
        "exact": lambda _, expected, answer: RowScore(float(answer.strip() == expected.strip())),
        "contains": lambda _, expected, answer: RowScore(float(expected.strip() in answer)),
        "regex": _by_pattern(pattern),
        "json": lambda _, expected, answer: json_score(expected, answer),
        "numeric": lambda _, expected, answer: number_score(expected, answer, tolerance),
        **dict.fromkeys(("calls", "tokens", "loss"), lambda *_: RowScore(0.0)),  # computed by `ModelOutputs.score`
    }
    return Scorer(TOKEN_ACCURACY if name == "tokens" else name, functions[name])


def fitting_score(answers: Sequence[str]) -> tuple[str, str]:
    """Return the score for these expected answers, and their kind."""
    if not answers:
        return "loss", "plain text"
    if all(isinstance(_parse_json(answer), dict) for answer in answers):
        return "json", "JSON objects"
    free_texts = sum(len(answer) > _MAX_SHORT_ANSWER or "\n" in answer.strip() for answer in answers)
    return ("tokens", "free text") if 2 * free_texts > len(answers) else ("exact", "short answers")


def json_score(expected: str, answer: str) -> RowScore:
    """Score JSON field by field. Raise DataError."""
    expected_value = _parse_json(expected)
    if expected_value is _NOT_JSON:
        raise DataError(f"the expected answer is not JSON: {expected[:100]!r}", "Use another --score for these rows.")
    answer_value = _parse_json(answer)
    if not isinstance(expected_value, dict) or not expected_value:
        return RowScore(float(json_equal(expected_value, answer_value)), {}, answer_value is not _NOT_JSON)
    # fields of nested objects are named a.b; lists are compared as a whole
    expected_fields = dict(_flat_fields(expected_value))
    answer_fields = dict(_flat_fields(answer_value)) if isinstance(answer_value, dict) else {}
    is_right = {
        name: name in answer_fields and json_equal(value, answer_fields[name]) for name, value in expected_fields.items()
    }
    # a field that is not expected counts as a wrong one
    score = sum(is_right.values()) / len({*expected_fields, *answer_fields})
    return RowScore(score, is_right, answer_value is not _NOT_JSON)


def number_score(expected: str, answer: str, tolerance: float) -> RowScore:
    """Score whether the last numbers agree. Raise DataError."""
    target, number = _last_number(expected), _last_number(answer)
    if target is None:
        raise DataError(f"the expected answer has no number: {expected[:100]!r}", "Use another --score for these rows.")
    # relative to the expected number, absolute where that is 0
    return RowScore(float(number is not None and abs(number - target) <= tolerance * (abs(target) or 1.0)))


def _by_pattern(pattern: str | None) -> ScoreAnswer:
    if pattern is None:
        return lambda _, expected, answer: RowScore(float(_compile(expected.strip()).search(answer) is not None))
    search = _compile(pattern).search

    def score_answer(_: str, expected: str, answer: str) -> RowScore:
        expected_match, answer_match = search(expected), search(answer)
        if expected_match is None:
            raise DataError(f"the pattern finds nothing in the expected answer {expected[:100]!r}", "Change --pattern.")
        # the pattern's groups are compared, without groups the whole match
        expected_part, answer_part = (match and (match.groups() or match[0]) for match in (expected_match, answer_match))
        return RowScore(float(expected_part == answer_part))

    return score_answer


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.MULTILINE)
    except (re.error, RecursionError, OverflowError) as error:
        problem = f"{pattern[:100]!r} is not a regular expression: {error}"
        raise CommandError(problem, r"For example --pattern '#### (\d+)'") from None


_NOT_JSON = object()  # the value of text that is not JSON


def _parse_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _flat_fields(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    fields = []
    for name, item in value.items():
        path = f"{prefix}{name}"
        fields += _flat_fields(item, f"{path}.") if isinstance(item, dict) and item else [(path, item)]
    return fields


def json_equal(first: Any, second: Any) -> bool:
    """Return whether JSON values are equal: 1 is 1.0, but true is not 1."""
    if isinstance(first, bool) or isinstance(second, bool):
        return first is second
    if isinstance(first, list) and isinstance(second, list):
        return len(first) == len(second) and all(map(json_equal, first, second))
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(json_equal(first[name], second[name]) for name in first)
    return bool(first == second)


def _last_number(text: str) -> float | None:
    matches = _NUMBER.findall(text)
    if not matches or len(matches[-1]) > _MAX_NUMBER:
        return None
    value = float(matches[-1].replace(",", ""))
    return value if math.isfinite(value) else None


def _by_function(source: str) -> ScoreAnswer:
    function = _load_function(source)

    def score_answer(prompt: str, expected: str, answer: str) -> RowScore:
        try:
            value = function(prompt, expected, answer)
        except (Exception, SystemExit) as error:  # a user's code may call exit()
            raise CommandError(f"{source} failed for the answer {answer[:100]!r}: {type(error).__name__}: {error}") from error
        if not isinstance(value, numbers.Real) or not math.isfinite(value):
            raise CommandError(
                f"{source} returned {str(value)[:60]!r} for the answer {answer[:100]!r}", "Return a number, True or False."
            )
        return RowScore(float(value))

    return score_answer


def _load_function(reference: str) -> Callable[[str, str, str], Any]:
    file, _, name = reference.rpartition(":")
    if name in SCORES:
        raise CommandError(f"{name} is a score of finetune", f"Rename your function, or use --score {name}.")
    example = "For example --score score.py:score, with  def score(prompt, expected, answer):"
    if not file.endswith(".py") or not name.isidentifier():
        raise CommandError(f"{reference[:200]!r} is not file.py:name", example)
    if not Path(file).is_file():
        raise CommandError(f"there is no file {file}", example)
    try:
        function = runpy.run_path(file).get(name)
    except (Exception, SystemExit) as error:
        raise CommandError(f"{file} can't be imported: {type(error).__name__}: {error}", "Correct the file.") from error
    if not callable(function):
        raise CommandError(f"{file} has no function {name}", example)
    return function


def call_score(expected: Sequence[Call], tools: Sequence[dict[str, Any]], answer: Answer) -> RowScore:
    """Return 1 for the same calls in any order, or for no call where none is expected."""
    offered_names = {tool.get("function", {}).get("name") for tool in tools}
    fields = {KNOWN_TOOL: not offered_names or all(_tool_name(call) in offered_names for call in answer.calls)}
    if not expected:
        # an answer that begins an unreadable call is not free of calls
        fields[NO_CALL_DUE] = not answer.calls and not answer.is_unreadable
        return RowScore(float(fields[NO_CALL_DUE]), fields, not answer.is_unreadable)
    expected_names, answer_names = [*map(_tool_name, expected)], [*map(_tool_name, answer.calls)]
    is_matched = _match_calls(expected, answer.calls, tools)
    fields[NAMES] = set(expected_names) == set(answer_names)
    fields[ARGUMENTS] = all(is_matched)
    fields[COUNT] = len(expected) == len(answer.calls)
    if len(expected) > 1:
        fields[ORDER] = expected_names == answer_names
    # fields depend on the expected calls alone, so that both models have the same
    for tool_name in dict.fromkeys(expected_names):
        matches = zip(expected_names, is_matched, strict=True)
        fields[f"tool {tool_name}"] = all(is_match for name, is_match in matches if name == tool_name)
    return RowScore(float(all(is_matched) and fields[COUNT]), fields, not answer.is_unreadable)


def _tool_name(call: Call) -> str:
    return str(call["function"]["name"])


def _match_calls(expected: Sequence[Call], calls: Sequence[Call], tools: Sequence[dict[str, Any]]) -> list[bool]:
    remaining = [_with_defaults(call, tools) for call in calls]
    is_matched = []
    for expected_call in [_with_defaults(call, tools) for call in expected]:
        indices = [index for index, call in enumerate(remaining) if json_equal(call, expected_call)]
        is_matched.append(bool(indices))
        if indices:  # a call of the answer counts once
            del remaining[indices[0]]
    return is_matched


def _with_defaults(call: Call, tools: Sequence[dict[str, Any]]) -> list[Any]:
    functions = [function for tool in tools if isinstance(function := tool.get("function"), dict)]
    parameters = next((function.get("parameters") for function in functions if function.get("name") == _tool_name(call)), None)
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    schemas = properties.items() if isinstance(properties, dict) else ()
    # a missing argument takes its default from the tool's schema
    defaults = {key: schema["default"] for key, schema in schemas if isinstance(schema, dict) and "default" in schema}
    return [_tool_name(call), {**defaults, **call["function"]["arguments"]}]
