"""Read the tools and tool calls of datasets, and the calls in answers that a chat template wrote."""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from finetune.data.checks import BadRow, Values, is_missing, parse_if_text, quoted, type_phrase, valid_json

#: OpenAI's form with arguments as an object, which transformers documents for chat templates:
#: `{"type": "function", "function": {"name": ..., "arguments": {...}}}`.
Call = dict[str, Any]

_TOOL_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)
_TOOL_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.S)
#: The part of a system prompt in which Hermes' and Qwen's templates list the tools and the form of a call.
_TOOL_LISTING = re.compile(
    r"(?:You are a function calling AI model\b|# Tools\b)(?:(?!<tools>\s*[\[{]).)*"
    r"<tools>\s*([\[{].*?)</tools>.*</tool_call>\s*",
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
    return tuple(_openai_tool(valid_json(tool, field)) for tool in tools)


def _openai_tool(tool: Values) -> Values:
    if "function" in tool or "name" not in tool:
        return tool
    parameters = tool.get("parameters")
    if isinstance(parameters, dict) and parameters and "properties" not in parameters and "type" not in parameters:
        tool = {**tool, "parameters": _json_schema(parameters)}
    return {"type": "function", "function": tool}


def _json_schema(parameters: Values) -> Values:
    properties, required = {}, []
    for name, description in parameters.items():  # of xLAM: {"city": {"type": "str, optional", "description": ...}}
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
    return [_openai_call(valid_json(call, path), f"{path}[{index}]") for index, call in enumerate(value)]


def _openai_call(call: Any, path: str) -> Call:
    if isinstance(call, str):
        call = parse_if_text(call, path)
    # the function stands in `function`, or beside the call's other keys
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
    before, *parts = _TOOL_CALL.split(text)  # calls at even indices, the texts after them at odd ones
    if not parts:
        return text, []
    if "".join(parts[1::2]).strip():
        raise BadRow(path, "has text after a <tool_call>; chat templates write an answer's text before its calls")
    return before.strip(), [_openai_call(_parse_literal(call, path), path) for call in parts[::2]]


def _parse_literal(text: str, path: str) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(text)
    try:  # Hermes' rows have Python's quotes
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise BadRow(path, f"has tools or a call that can't be read: {quoted(text)}") from None


def responses_in_text(text: str) -> list[str]:
    """Return the contents of `<tool_response>` tags, or the whole text if it has anything else."""
    responses, has_other_text = _TOOL_RESPONSE.findall(text), _TOOL_RESPONSE.sub("", text).strip()
    return responses if responses and not has_other_text else [text]


def tools_in_prompt(prompt: str, path: str) -> tuple[str, tuple[Values, ...]]:
    """Split Hermes' or Qwen's tool listing off a system prompt."""
    match = _TOOL_LISTING.search(prompt)
    if match is None:
        return prompt, ()
    listing = match[1].strip()  # a list, or one object on each line
    tools = _parse_literal(listing if listing.startswith("[") else f"[{listing.replace(chr(10), ',')}]", path)
    # the chat template writes the listing again
    return (prompt[: match.start()] + prompt[match.end() :]).strip(), read_tools(tools, path)


def name_replies(messages: list[Values]) -> None:
    """Give nameless tool replies the name of their call, by id or in order."""
    open_calls: list[tuple[str | None, str]] = []
    for message in messages:
        if message["role"] == "assistant":
            open_calls = [(call.get("id"), call["function"]["name"]) for call in message.get("tool_calls") or []]
        elif message["role"] == "tool" and open_calls:
            reply_id = message.get("tool_call_id")
            index = next((index for index, (call_id, _) in enumerate(open_calls) if reply_id and call_id == reply_id), 0)
            message.setdefault("name", open_calls.pop(index)[1])


#: Names and arguments of the calls that were read, and the position after them.
_CallsAndEnd = tuple[list[tuple[str, dict[str, Any]]], int]
_NAME = r"[\w.\-/]+"
_CODE_FENCE = r"(?:\s*```(?:json)?\s*)?"
#: The JSON value of a text that begins at a position, and the position after it. Raises ValueError or RecursionError.
_json_at = json.JSONDecoder().raw_decode
#: An argument in tags. Its end tag counts only before the next argument or the end of the call: a value may contain it.
_TAGGED_ARGUMENTS = tuple(
    re.compile(rf"\s*{name_and_start}(.*?){end_tag}(?=\s*(?:{next_tags}|\Z))", re.S)
    for name_and_start, end_tag, next_tags in (
        (r"<parameter=([^>]+)>\n?", r"\n?</parameter>", "<parameter=|</function>"),
        (
            r"<[\w:|｜]*parameter name=\"([^\"]+)\"[^>]*>", r"</[\w:|｜]*parameter>",
            r"<[\w:|｜]*parameter name=|</[\w:|｜]*invoke>",
        ),
        (r"<arg_key>(.*?)</arg_key>\s*<arg_value>", "</arg_value>", "<arg_key>|</tool_call>"),
    )
)  # fmt: skip
_GEMMA_QUOTE = '<|"|>'  # quotes of Gemma 4's strings: `{key:<|"|>text<|"|>}`


@dataclass(frozen=True)
class Answer:
    """A model's answer."""

    text: str
    calls: list[Call] = field(default_factory=list)
    is_unreadable: bool = False  # the text begins a call that can't be read
    thought: str = ""


def assistant_message(answer: Any) -> dict[str, Any]:
    """Return an answer as a message for a chat template."""
    optional = {"tool_calls": [*answer.calls], "reasoning_content": answer.thought}
    return {"role": "assistant", "content": answer.text, **{name: value for name, value in optional.items() if value}}


@dataclass(frozen=True)
class CallSyntax:
    """A syntax in which models write calls."""

    openings: tuple[str, ...]  # literal texts with which `opening` may begin
    opening: re.Pattern[str]
    #: Reads the calls at the opening. Raises ValueError, LookupError or TypeError for an unreadable call.
    read: Callable[[str, re.Match[str]], _CallsAndEnd]
    loses_types: bool = False  # arguments are written as text, and get the types of the tool's schema

    def answer(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Answer:
        """Split a text into the calls and the text around them."""
        position = 0
        calls: list[Call] = []
        text_between = ""
        while match := self.opening.search(text, position):
            text_between += text[position : match.start()]
            try:
                names_and_arguments, position = self.read(text, match)
                for name, arguments in names_and_arguments:
                    [call] = read_calls({"name": name, "arguments": arguments}, "answer")
                    calls.append(_with_types(call, tools) if self.loses_types else call)
            except (ValueError, LookupError, TypeError, SyntaxError, RecursionError, MemoryError, BadRow):
                return Answer(text, is_unreadable=True)
        texts = (piece.strip() for piece in (text_between, text[position:]))
        return Answer("\n".join(filter(None, texts)), calls) if calls else Answer(text)


def syntax_of(text: str, calls: Sequence[tuple[str, dict[str, Any]]]) -> CallSyntax | None:
    """Return the syntax that reads exactly these calls, or None."""
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
    """Return the text and each call as `name({...})`, in lines."""
    functions = (call["function"] for call in answer.calls)
    lines = (f"{function['name']}({json.dumps(function['arguments'], ensure_ascii=False)})" for function in functions)
    return "\n".join(filter(None, [answer.text, *lines]))


def _with_types(call: Call, tools: Sequence[dict[str, Any]]) -> Call:
    functions = (tool.get("function") for tool in tools)
    name, texts = call["function"]["name"], call["function"]["arguments"]
    schemas: Any = next((function for function in functions if isinstance(function, dict) and function.get("name") == name), {})
    for key in ("parameters", "properties"):  # in the function, the schemas of its arguments
        schemas = schemas.get(key)
        schemas = schemas if isinstance(schemas, dict) else {}
    arguments = {argument: _typed(text, schemas.get(argument)) for argument, text in texts.items()}
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _typed(text: Any, schema: Any) -> Any:
    types = _json_types(schema)
    # text where the schema says so, else the JSON value or Python constant in the text
    if not isinstance(text, str) or types == {"string"}:
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = {"True": True, "False": False, "None": None}.get(text, text)
    return text if types and "string" in types and _type_of(value) not in types else value


def _json_types(schema: Any) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    names = schema.get("type")
    types = {names} if isinstance(names, str) else {name for name in names or () if isinstance(name, str)}
    if isinstance(schema.get("enum"), list):
        types |= set(map(_type_of, schema["enum"]))
    for key in ("anyOf", "oneOf"):
        types |= {name for alternative in schema.get(key) or () for name in _json_types(alternative)}
    return types


def _type_of(value: Any) -> str:
    return _JSON_TYPES.get(type(value).__name__, "null")


def _end_of_closing(text: str, position: int, pattern: str) -> int:
    match = re.compile(rf"\s*(?:{pattern})").match(text, position)
    if match is None:
        raise ValueError("a call without its end")
    return match.end()


def _json_calls(text: str, match: re.Match[str], *, closing: str = "") -> _CallsAndEnd:
    value, end = _json_at(text, match.end())
    # the name stands before the arguments, or beside them in JSON
    if "name" in match.re.groupindex:
        if not isinstance(value, dict):
            raise ValueError("arguments that are no object")
        value = {"name": match["name"], "arguments": value}
    return _names_and_arguments(value if isinstance(value, list) else [value]), _end_of_closing(text, end, closing)


def _names_and_arguments(values: list[Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(value["name"], value.get("arguments", value.get("parameters", {}))) for value in values]


def _bare_objects(text: str, match: re.Match[str]) -> _CallsAndEnd:
    # JSON objects without an end mark, separated by white space, `;` or `,`
    position, calls = match.end(), []
    while position < len(text) and text[position] == "{":
        call, end = _json_at(text, position)
        calls.append(call)
        position = re.compile(r"[\s;,]*").match(text, end).end()  # type: ignore[union-attr]
    # other JSON is no call
    if text[position:].strip():
        raise ValueError("text after the calls")
    return _names_and_arguments(calls), position


def _tagged_call(text: str, match: re.Match[str], *, end_tag: str = "", closing: str) -> _CallsAndEnd:
    arguments, position = dict[str, Any](), match.end()
    while argument := next(filter(None, (pattern.match(text, position) for pattern in _TAGGED_ARGUMENTS)), None):
        arguments[argument[1]], position = argument[2], argument.end()
    # `end_tag` follows the last argument, `closing` the call
    return [(match["name"], arguments)], _end_of_closing(text, _end_of_closing(text, position, end_tag), closing)


class _JsonNames(ast.NodeTransformer):
    # models write JSON's names of constants, too
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(json.loads(node.id)) if node.id in ("true", "false", "null") else node


def _python_calls(text: str, match: re.Match[str]) -> _CallsAndEnd:
    source, mark, _ = text[match.end() :].partition("<|tool_call_end|>")
    if not mark:
        raise ValueError("a list without its end")
    tree = ast.parse(source.strip(), mode="eval").body
    items: list[Any] = tree.elts if isinstance(tree, ast.List) else [tree]
    if any(not isinstance(item, ast.Call) or item.args for item in items):
        raise ValueError("no call with named arguments")
    names_and_arguments = [
        (ast.unparse(item.func), {pair.arg: ast.literal_eval(_JsonNames().visit(pair.value)) for pair in item.keywords})
        for item in items
    ]
    return names_and_arguments, match.end() + len(source + mark)


def _gemma_call(text: str, match: re.Match[str]) -> _CallsAndEnd:
    source, position = "", match.end()
    for index, piece in enumerate(text[position:].split(_GEMMA_QUOTE)):
        if index % 2:  # a string in Gemma's quotes
            source += json.dumps(piece)
        else:
            inside, closing, _ = piece.partition("<tool_call|>")
            source += re.sub(r'([{,])\s*([^\s"{}\[\],:<]+):', r'\1"\2":', inside)  # JSON, but its keys have no quotes
            if closing:
                return [(match["name"], json.loads(source))], position + len(inside + closing)
        position += len(piece + _GEMMA_QUOTE)
    raise ValueError("a call without its end")


def _syntax(openings: tuple[str, ...], pattern: str, read: Callable[..., _CallsAndEnd], **options: str) -> CallSyntax:
    # in tags, arguments are text
    return CallSyntax(openings, re.compile(pattern), partial(read, **options), loses_types=read is _tagged_call)


#: Tried in this order: special syntaxes come before general ones.
SYNTAXES = (
    _syntax(  # Qwen3-Coder: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>
        ("<tool_call>",), rf"<tool_call>\s*<function=(?P<name>{_NAME})>\s*",
        _tagged_call, end_tag="</function>", closing="</tool_call>",
    ),
    _syntax(  # GLM: <tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>
        ("<tool_call>",), rf"<tool_call>\s*(?P<name>{_NAME})\s*(?=<)",
        _tagged_call, closing="</tool_call>",
    ),
    _syntax(  # <function_calls><invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke></function_calls>
        ("<atem:function_calls>", "<function_calls>", "<｜DSML｜function_calls>", " to="),
        rf"(?:\s*(?:<\|start\|>assistant)?\s*to={_NAME}<\|message\|>)?<[\w:|｜]*function_calls>\s*"
        rf"<[\w:|｜]*invoke name=\"(?P<name>{_NAME})\">\s*",
        _tagged_call, end_tag=r"</[\w:|｜]*invoke>", closing=r"</[\w:|｜]*function_calls>(?:<\|eom\|>)?",
    ),
    _syntax(("<tool_call>",), r"<tool_call>\s*(?=[\[{])", _json_calls, closing="</tool_call>"),  # Hermes, Qwen
    _syntax(  # older Mistral, Granite, Phi-4-mini: a list of JSON objects after a mark
        ("[TOOL_CALLS]", "<|tool_call|>"), r"(?:<\|tool_call\|>|\[TOOL_CALLS\])\s*(?=[\[{])",
        _json_calls, closing=r"(?:<\|/tool_call\|>)?",
    ),
    _syntax(  # Mistral: [TOOL_CALLS]NAME[ARGS]{...}
        ("[TOOL_CALLS]",),
        rf"\[TOOL_CALLS\](?P<name>{_NAME})(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?(?=\{{)", _json_calls,
    ),
    _syntax(  # DeepSeek
        ("<｜tool▁call",),
        rf"(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>{_NAME})(?:<｜tool▁sep｜>)?{_CODE_FENCE}",
        _json_calls, closing=r"(?:```)?<｜tool▁call▁end｜>\s*(?:<｜tool▁calls▁end｜>)?",
    ),
    _syntax(  # Harmony
        ("<|channel|>", " to=functions."),
        rf"(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s*to=functions\.(?P<name>{_NAME})(?:<\|channel\|>\w+)?"
        r"[^<{]*(?:<\|constrain\|>\w+)?<\|message\|>",
        _json_calls,
    ),
    _syntax(("<|tool_call_start|>",), r"<\|tool_call_start\|>", _python_calls),  # LFM2: [NAME(KEY=VALUE)]
    _syntax(("<|tool_call>",), rf"<\|tool_call>call:(?P<name>{_NAME})(?=\{{)", _gemma_call),
    _syntax(  # Llama: bare JSON
        ("{", "<|python_tag|>"),
        r"\A\s*(?:<\|python_tag\|>)?\s*(?=\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?\"name\"\s*:\s*\"[^\"]+\"\s*,\s*"
        r"\"(?:parameters|arguments)\"\s*:)",
        _bare_objects,
    ),
)  # fmt: skip
