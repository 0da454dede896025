"""Convert tools and tool calls of datasets to one form."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from typing import Any

from finetune.data.checks import BadRow, Values, is_missing, parse_if_text, quoted, type_phrase, valid_json

#: OpenAI's form with arguments as an object, which transformers documents for chat templates:
#: `{"type": "function", "function": {"name": ..., "arguments": {...}}}`.
Call = dict[str, Any]

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)
_TOOL_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.S)
_TOOLS = re.compile(r"<tools>\s*([\[{].*?)\s*</tools>", re.S)
#: The part of a system prompt in which Hermes' and Qwen's templates list the tools and the form of a call.
_TOOL_LISTING = re.compile(
    r"(?:You are a function calling AI model\b|# Tools\b)(?:(?!<tools>\s*[\[{]).)*<tools>\s*[\[{].*?</tools>.*</tool_call>\s*",
    re.S,
)
_ARGUMENT_KEYS = ("arguments", "parameters", "args", "input")
#: Python's names of types, as xLAM's files write them, in JSON Schema.
_JSON_TYPES = {
    "str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "tuple": "array", "set": "array",
    "dict": "object",
}  # fmt: skip


def read_tools(value: Any, field: str) -> tuple[Values, ...]:
    """Read the tool descriptions in a column. Raise BadRow."""
    tools = parse_if_text(value or None, field)
    if is_missing(tools):
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(field, f"is {type_phrase(tools)}, not a list of tool descriptions")
    return tuple(_tool(valid_json(tool, field)) for tool in tools)


def _tool(tool: Values) -> Values:
    if "function" in tool or "name" not in tool:
        return tool
    parameters = tool.get("parameters")
    if isinstance(parameters, dict) and parameters and "properties" not in parameters and "type" not in parameters:
        tool = {**tool, "parameters": _schema(parameters)}
    return {"type": "function", "function": tool}


def _schema(parameters: Values) -> Values:
    properties, required = {}, []
    for name, description in parameters.items():
        description = description if isinstance(description, dict) else {"description": str(description)}
        type_words = re.split(r"[\s,\[]+", str(description.get("type", "str")).strip())
        properties[name] = {**description, "type": _JSON_TYPES.get(type_words[0].lower(), type_words[0].lower())}
        if "optional" not in type_words and "default" not in description:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


def read_calls(value: Any, path: str) -> list[Call]:
    """Read one or several calls, also as JSON. Raise BadRow."""
    # OpenAI's `tool_calls`, ShareGPT's `function_call` or xLAM's `answers`
    value = parse_if_text(value, path)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise BadRow(path, f"is {type_phrase(value)}, not a list")
    return [_call(valid_json(call, path), f"{path}[{index}]") for index, call in enumerate(value)]


def _call(call: Any, path: str) -> Call:
    if isinstance(call, str):
        call = parse_if_text(call, path)
    function = parse_if_text(call.get("function", call), path) if isinstance(call, dict) and call else None
    function = {"name": function} if isinstance(function, str) else function
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise BadRow(path, "has no name of a tool")
    arguments = next((function[key] for key in _ARGUMENT_KEYS if key in function), None)
    # some datasets encode arguments twice
    for _ in range(2):
        if isinstance(arguments, str):
            arguments = parse_if_text(arguments, f"{path}.arguments") if arguments.strip() else {}
    if is_missing(arguments):
        arguments = {}
    if not isinstance(arguments, dict):
        raise BadRow(f"{path}.arguments", f"is {type_phrase(arguments)}, not an object with named arguments")
    converted: Call = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {**converted, "id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else converted


def calls_in_text(text: str, path: str) -> tuple[str, list[Call]]:
    """Split an answer into text and `<tool_call>` blocks. Raise BadRow."""
    matches = list(_TOOL_CALL.finditer(text))
    if not matches:
        return text, []
    if text[matches[-1].end() :].strip():
        raise BadRow(path, "has text after a <tool_call>; chat templates write an answer's text before its calls")
    return text[: matches[0].start()].strip(), [_call(_parse_literal(match[1], path), path) for match in matches]


def _parse_literal(text: str, path: str) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise BadRow(path, f"has a <tool_call> that can't be read: {quoted(text)}") from None


def responses_in_text(text: str) -> list[str]:
    """Return the replies in `<tool_response>` tags, or the whole text."""
    responses = _TOOL_RESPONSE.findall(text)
    return responses if responses and not _TOOL_RESPONSE.sub("", text).strip() else [text]


def tools_in_prompt(prompt: str, path: str) -> tuple[str, tuple[Values, ...]]:
    """Split Hermes' or Qwen's tool listing off a system prompt."""
    listing_match = _TOOL_LISTING.search(prompt)
    tools_match = _TOOLS.search(listing_match[0]) if listing_match else None
    if listing_match is None or tools_match is None:
        return prompt, ()
    listing = tools_match[1]
    tools = _parse_literal(listing if listing.startswith("[") else f"[{listing.replace(chr(10), ',')}]", path)
    # the chat template writes the listing again
    return (prompt[: listing_match.start()] + prompt[listing_match.end() :]).strip(), read_tools(tools, path)


def name_replies(messages: list[Values]) -> None:
    """Give nameless tool replies the name of their call, by id or in order."""
    open_calls: list[tuple[str | None, str]] = []
    for message in messages:
        if message["role"] == "assistant":
            open_calls = [(call.get("id"), call["function"]["name"]) for call in message.get("tool_calls") or []]
        elif message["role"] == "tool" and open_calls:
            call_id = message.get("tool_call_id")
            index = next((position for position, (name, _) in enumerate(open_calls) if call_id and name == call_id), 0)
            message.setdefault("name", open_calls.pop(index)[1])
