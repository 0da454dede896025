"""Score an answer's tool calls against the expected calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.data.call_syntax import Answer
from finetune.data.tool_calls import Call
from finetune.evaluate.scorers import RowScore, json_equal

#: Parts of the score, each over the rows that it is about.
NO_CALL_DUE, NAMES, ARGUMENTS, COUNT, ORDER, KNOWN_TOOL = (
    "no call where none is due", "names", "arguments", "number of calls", "order of calls", "only tools that are offered",
)  # fmt: skip


def call_score(expected: Sequence[Call], tools: Sequence[dict[str, Any]], answer: Answer) -> RowScore:
    """Return 1 for the same calls in any order, or for no call where none is expected."""
    offered = {tool.get("function", {}).get("name") for tool in tools}
    fields = {KNOWN_TOOL: not offered or all(_name(call) in offered for call in answer.calls)}
    if not expected:
        # an answer that begins an unreadable call is not free of calls
        fields[NO_CALL_DUE] = not answer.calls and not answer.is_unreadable
        return RowScore(float(fields[NO_CALL_DUE]), fields, not answer.is_unreadable)
    names, answered = [*map(_name, expected)], [*map(_name, answer.calls)]
    matched = _matched(expected, answer.calls, tools)
    fields[NAMES] = sorted(set(names)) == sorted(set(answered))
    fields[ARGUMENTS] = all(matched)
    fields[COUNT] = len(expected) == len(answer.calls)
    if len(expected) > 1:
        fields[ORDER] = names == answered
    # fields depend on the expected calls alone, so that both models have the same
    for tool_name in dict.fromkeys(names):
        fields[f"tool {tool_name}"] = all(
            is_matched for name, is_matched in zip(names, matched, strict=True) if name == tool_name
        )
    return RowScore(float(all(matched) and fields[COUNT]), fields, not answer.is_unreadable)


def _name(call: Call) -> str:
    return str(call["function"]["name"])


def _matched(expected: Sequence[Call], calls: Sequence[Call], tools: Sequence[dict[str, Any]]) -> list[bool]:
    remaining = [[_name(call), _with_defaults(call, tools)] for call in calls]
    results = []
    for call in expected:
        wanted = [_name(call), _with_defaults(call, tools)]
        matches = [index for index, answered in enumerate(remaining) if json_equal(answered, wanted)]
        results.append(bool(matches))
        # a call of the answer counts once
        for index in matches[:1]:
            del remaining[index]
    return results


def _with_defaults(call: Call, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    functions = [function for tool in tools if isinstance(function := tool.get("function"), dict)]
    parameters = next((function.get("parameters") for function in functions if function.get("name") == _name(call)), None)
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    schemas = properties.items() if isinstance(properties, dict) else ()
    # a missing argument has the default of the tool's schema
    defaults = {key: schema["default"] for key, schema in schemas if isinstance(schema, dict) and "default" in schema}
    return {**defaults, **call["function"]["arguments"]}
