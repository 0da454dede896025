"""Read tool calls in the form of a chat template."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from finetune.data.checks import BadRow
from finetune.data.tool_calls import Call, read_calls

#: Names and arguments of the calls that were read, and the position after them.
_Read = tuple[list[tuple[str, dict[str, Any]]], int]
_NAME = r"[\w.\-/]+"
_CODE_FENCE = r"(?:\s*```(?:json)?\s*)?"
#: The JSON value of a text that begins at a position, and the position after it. Raises ValueError or RecursionError.
_json_at = json.JSONDecoder().raw_decode
#: An argument in tags. Its end counts only before the next argument or the end of the call: it may be part of a value.
_TAGGED = tuple(
    re.compile(rf"\s*{before}(.*?){after}(?=\s*(?:{next_tags}|\Z))", re.S)
    for before, after, next_tags in (
        (r"<parameter=([^>]+)>\n?", r"\n?</parameter>", "<parameter=|</function>"),
        (
            r"<[\w:|｜]*parameter name=\"([^\"]+)\"[^>]*>", r"</[\w:|｜]*parameter>",
            r"<[\w:|｜]*parameter name=|</[\w:|｜]*invoke>",
        ),
        (r"<arg_key>(.*?)</arg_key>\s*<arg_value>", "</arg_value>", "<arg_key>|</tool_call>"),
    )
)  # fmt: skip
#: Quotes of Gemma 4's strings: `{key:<|"|>text<|"|>}`.
_GEMMA_QUOTE = '<|"|>'


@dataclass(frozen=True)
class Answer:
    """A model's answer."""

    text: str
    calls: list[Call] = field(default_factory=list)
    #: The text begins a call that can't be read.
    is_unreadable: bool = False
    thought: str = ""


def assistant_message(answer: Any) -> dict[str, Any]:
    """Return an answer as the message that templates write."""
    more = {"tool_calls": [*answer.calls], "reasoning_content": answer.thought}
    return {"role": "assistant", "content": answer.text, **{name: value for name, value in more.items() if value}}


@dataclass(frozen=True)
class CallSyntax:
    """A form of calls."""

    #: Literal texts with which `opening` may begin.
    openings: tuple[str, ...]
    opening: re.Pattern[str]
    #: Reads the calls at the opening. Raises ValueError, LookupError or TypeError for an unreadable call.
    read: Callable[[str, re.Match[str]], _Read]
    #: Arguments are written as text, and get the types of the tool's schema.
    loses_types: bool = False

    def answer(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Answer:
        position = 0
        calls: list[Call] = []
        between = ""
        while match := self.opening.search(text, position):
            between += text[position : match.start()]
            try:
                named, position = self.read(text, match)
                for name, arguments in named:
                    [call] = read_calls({"name": name, "arguments": arguments}, "answer")
                    calls.append(_with_types(call, tools) if self.loses_types else call)
            except (ValueError, LookupError, TypeError, SyntaxError, RecursionError, MemoryError, BadRow):
                return Answer(text, is_unreadable=True)
        parts = (part.strip() for part in (between, text[position:]))
        return Answer("\n".join(filter(None, parts)), calls) if calls else Answer(text)


def syntax_of(text: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> CallSyntax | None:
    """Return the form with exactly these calls, or None."""
    tools = []
    for name, arguments in calls:
        types = {argument: {"type": _type_of(value)} for argument, value in arguments.items()}
        tools.append({"function": {"name": name, "parameters": {"properties": types}}})
    for syntax in SYNTAXES:
        answer = syntax.answer(text, tools)
        if [(call["function"]["name"], call["function"]["arguments"]) for call in answer.calls] == list(calls):
            return syntax
    return None


def display_text(answer: Answer) -> str:
    """Return an answer as people read it."""
    lines = [
        f"{call['function']['name']}({json.dumps(call['function']['arguments'], ensure_ascii=False)})" for call in answer.calls
    ]
    return "\n".join(filter(None, [answer.text, *lines]))


def _with_types(call: Call, tools: Sequence[dict[str, Any]]) -> Call:
    functions = (tool.get("function") for tool in tools)
    name, values = call["function"]["name"], call["function"]["arguments"]
    schemas: Any = next((function for function in functions if isinstance(function, dict) and function.get("name") == name), {})
    for key in ("parameters", "properties"):
        schemas = schemas.get(key)
        schemas = schemas if isinstance(schemas, dict) else {}
    arguments = {argument: _typed(value, schemas.get(argument)) for argument, value in values.items()}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _typed(text: Any, schema: Any) -> Any:
    types = _types(schema)
    # text where the schema says so, else the JSON value or Python constant in the text
    if not isinstance(text, str) or types == {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = {"True": True, "False": False, "None": None}.get(text, text)
    return text if types and "string" in types and _type_of(value) not in types else value


def _types(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    names = schema.get("type")
    types = {names} if isinstance(names, str) else {name for name in names or () if isinstance(name, str)}
    if isinstance(schema.get("enum"), list):
        types |= set(map(_type_of, schema["enum"]))
    for key in ("anyOf", "oneOf"):
        types |= {name for part in schema.get(key) or () for name in _types(part)}
    return types


_JSON_TYPES = {bool: "boolean", str: "string", int: "integer", float: "number", dict: "object", list: "array"}


def _type_of(value: Any) -> str:
    return _JSON_TYPES.get(type(value), "null")


def _closing(text: str, position: int, pattern: str) -> int:
    match = re.compile(rf"\s*(?:{pattern})").match(text, position)
    if match is None:
        raise ValueError("a call without its end")
    return match.end()


def _json_objects(text: str, match: re.Match[str], *, closing: str) -> _Read:
    value, end = _json_at(text, match.end())
    return _named(value if isinstance(value, list) else [value]), _closing(text, end, closing)


def _named(values: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(value["name"], value.get("arguments", value.get("parameters", {}))) for value in values]


def _named_json(text: str, match: re.Match[str], *, closing: str = "") -> _Read:
    arguments, end = _json_at(text, match.end())
    if not isinstance(arguments, dict):
        raise ValueError("arguments that are no object")
    return [(match["name"], arguments)], _closing(text, end, closing)


def _bare_objects(text: str, match: re.Match[str]) -> _Read:
    position, values = match.end(), []
    while position < len(text) and text[position] == "{":
        value, end = _json_at(text, position)
        values.append(value)
        position = re.compile(r"[\s;,]*").match(text, end).end()  # type: ignore[union-attr]
    # other JSON is no call
    if text[position:].strip():
        raise ValueError("text after the calls")
    return _named(values), position


def _tagged(text: str, match: re.Match[str], *, end_tag: str = "", closing: str) -> _Read:
    arguments, position = dict[str, Any](), match.end()
    while argument := next(filter(None, (pattern.match(text, position) for pattern in _TAGGED)), None):
        arguments[argument[1]], position = argument[2], argument.end()
    # `end_tag` follows the last argument, `closing` the call
    return [(match["name"], arguments)], _closing(text, _closing(text, position, end_tag), closing)


class _JsonNames(ast.NodeTransformer):
    # models write JSON's names of constants, too
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(json.loads(node.id)) if node.id in ("true", "false", "null") else node


def _python(text: str, match: re.Match[str]) -> _Read:
    end = text.find("<|tool_call_end|>", match.end())
    while end >= 0:
        try:
            tree = ast.parse(text[match.end() : end].strip(), mode="eval").body
            break
        except SyntaxError:  # the mark may be inside an argument
            end = text.find("<|tool_call_end|>", end + 1)
    else:
        raise ValueError("a list without its end")
    items: list[Any] = tree.elts if isinstance(tree, ast.List) else [tree]
    if any(not isinstance(item, ast.Call) or item.args for item in items):
        raise ValueError("no call with named arguments")
    named = [
        (ast.unparse(item.func), {word.arg: ast.literal_eval(_JsonNames().visit(word.value)) for word in item.keywords})
        for item in items
    ]
    return named, end + len("<|tool_call_end|>")


def _gemma(text: str, match: re.Match[str]) -> _Read:
    source, position = "", match.end()
    for index, piece in enumerate(text[position:].split(_GEMMA_QUOTE)):
        if index % 2:
            source += json.dumps(piece)
        else:
            inside, closing, _ = piece.partition("<tool_call|>")
            source += re.sub(r'([{,])\s*([^\s"{}\[\],:<]+):', r'\1"\2":', inside)
            if closing:
                return _named([{"name": match["name"], "arguments": json.loads(source)}]), position + len(inside + closing)
        position += len(piece + _GEMMA_QUOTE)
    raise ValueError("a call without its end")


def _syntax(openings: tuple[str, ...], pattern: str, read: Callable[..., _Read], **options: str) -> CallSyntax:
    # in tags, arguments are text
    return CallSyntax(openings, re.compile(pattern), partial(read, **options), loses_types=read is _tagged)


#: The forms, more special ones first.
SYNTAXES = (
    _syntax(  # tags in tool_call
        ("<tool_call>",), rf"<tool_call>\s*<function=(?P<name>{_NAME})>\s*",
        _tagged, end_tag="</function>", closing="</tool_call>",
    ),
    _syntax(  # key and value tags
        ("<tool_call>",), rf"<tool_call>\s*(?P<name>{_NAME})\s*(?=<)",
        _tagged, closing="</tool_call>",
    ),
    _syntax(  # invoke
        ("<atem:function_calls>", "<function_calls>", "<｜DSML｜function_calls>", " to="),
        rf"(?:\s*(?:<\|start\|>assistant)?\s*to={_NAME}<\|message\|>)?<[\w:|｜]*function_calls>\s*"
        rf"<[\w:|｜]*invoke name=\"(?P<name>{_NAME})\">\s*",
        _tagged, end_tag=r"</[\w:|｜]*invoke>", closing=r"</[\w:|｜]*function_calls>(?:<\|eom\|>)?",
    ),
    _syntax(("<tool_call>",), r"<tool_call>\s*(?=[\[{])", _json_objects, closing="</tool_call>"),
    _syntax(  # JSON after a mark
        ("[TOOL_CALLS]", "<|tool_call|>"), r"(?:<\|tool_call\|>|\[TOOL_CALLS\])\s*(?=[\[{])",
        _json_objects, closing=r"(?:<\|/tool_call\|>)?",
    ),
    _syntax(  # name and JSON in a tag
        ("[TOOL_CALLS]",),
        rf"\[TOOL_CALLS\](?P<name>{_NAME})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?=\{{)", _named_json,
    ),
    _syntax(  # DeepSeek
        ("<｜tool▁call",),
        rf"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>{_NAME})(?:<｜tool▁sep｜>)?{_CODE_FENCE}",
        _named_json, closing=r"(?:```)?<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?",
    ),
    _syntax(  # Harmony
        ("<|channel|>", " to=functions."),
        rf"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s*to=functions\.(?P<name>{_NAME})(?:<\|channel\|>\w+)?"
        r"[^<{]*(?:<\|constrain\|>\w+)?<\|message\|>",
        _named_json,
    ),
    _syntax(("<|tool_call_start|>",), r"<\|tool_call_start\|>", _python),
    _syntax(("<|tool_call>",), rf"<\|tool_call>call:(?P<name>{_NAME})(?=\{{)", _gemma),
    _syntax(  # bare JSON
        ("{", "<|python_tag|>"),
        r"\A\s*(?:<\|python_tag\|>)?\s*(?=\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?\"name\"\s*:\s*\"[^\"]+\"\s*,\s*"
        r"\"(?:parameters|arguments)\"\s*:)",
        _bare_objects,
    ),
)  # fmt: skip
