"""Tools and tool calls in the ways that datasets write them -> one form, and back again from rendered text.

The one form is OpenAI's with arguments as an object, which transformers documents for chat templates:
`{"type": "function", "function": {"name": ..., "arguments": {...}}}`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from typing import Any

from finetune.data.checks import BadRow, is_missing, kind_of, parsed_if_text, quoted, valid_json

Call = dict[str, Any]

_TAGGED = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.S)
_RESPONSE = re.compile(r"<tool_response>\s*(.*?)\s*</tool_response>", re.S)
_TOOLS = re.compile(r"<tools>\s*([\[{].*?)\s*</tools>", re.S)
#: The part of a system prompt in which Hermes' and Qwen's templates list the tools and the form of a call.
_LISTING = re.compile(
    r"(?:You are a function calling AI model\b|# Tools\b)(?:(?!<tools>\s*[\[{]).)*<tools>\s*[\[{].*?</tools>.*</tool_call>\s*",
    re.S,
)
_NAMES, _ARGUMENTS = ("name", "tool_name", "function"), ("arguments", "parameters", "args", "input")
#: Python's names of types, as xLAM's files write them, in JSON Schema.
_TYPES = {
    "str": "string", "int": "integer", "float": "number", "bool": "boolean", "list": "array", "tuple": "array", "set": "array",
    "dict": "object",
}  # fmt: skip


def read_tools(value: Any, field: str) -> tuple[dict[str, Any], ...]:
    """The tool descriptions in a column, each as `{"type": "function", "function": {...}}`. Raises BadRow."""
    tools = parsed_if_text(value or None, field)
    if is_missing(tools):
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRow(field, f"is {kind_of(tools)}, not a list of tool descriptions")
    return tuple(_tool(valid_json(tool, field)) for tool in tools)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if "function" in tool or "name" not in tool:
        return tool
    parameters = tool.get("parameters")
    if isinstance(parameters, dict) and parameters and "properties" not in parameters and "type" not in parameters:
        tool = {**tool, "parameters": _schema(parameters)}
    return {"type": "function", "function": tool}


def _schema(parameters: dict[str, Any]) -> dict[str, Any]:
    """xLAM's parameters (`{"city": {"type": "str, optional", ...}}`) as JSON Schema."""
    properties, required = {}, []
    for name, about in parameters.items():
        about = about if isinstance(about, dict) else {"description": str(about)}
        words = re.split(r"[\s,\[]+", str(about.get("type", "str")).strip())
        properties[name] = {**about, "type": _TYPES.get(words[0].lower(), words[0].lower())}
        if "optional" not in words and "default" not in about:
            required.append(name)
    return {"type": "object", "properties": properties, "required": required}


def read_calls(value: Any, where: str) -> list[Call]:
    """The calls in OpenAI's `tool_calls`, ShareGPT's `function_call` or xLAM's `answers`: one or several, or as JSON.

    Raises BadRow.
    """
    value = parsed_if_text(value, where)
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list):
        raise BadRow(where, f"is {kind_of(value)}, not a list")
    return [_call(valid_json(call, where), f"{where}[{index}]") for index, call in enumerate(value)]


def _call(call: Any, where: str) -> Call:
    """One call. Arguments in a string, even one encoded twice, become an object."""
    if isinstance(call, str):
        call = parsed_if_text(call, where)
    inner = parsed_if_text(call.get("function", call), where) if isinstance(call, dict) and call else None
    inner = {"name": inner} if isinstance(inner, str) else inner
    if not isinstance(inner, dict) or not isinstance(inner.get("name"), str) or not inner["name"].strip():
        raise BadRow(where, "has no name of a tool")
    arguments = next((inner[key] for key in _ARGUMENTS if key in inner), None)
    for _ in range(2):
        if isinstance(arguments, str):
            arguments = parsed_if_text(arguments, f"{where}.arguments") if arguments.strip() else {}
    if is_missing(arguments):
        arguments = {}
    if not isinstance(arguments, dict):
        raise BadRow(f"{where}.arguments", f"is {kind_of(arguments)}, not an object with named arguments")
    made: Call = {"type": "function", "function": {"name": inner["name"], "arguments": arguments}}
    return {**made, "id": call["id"]} if isinstance(call.get("id"), str) and call["id"] else made


def calls_in_text(text: str, where: str) -> tuple[str, list[Call]]:
    """The text of an answer without its `<tool_call>` blocks, and their calls; no calls where it has none. Raises BadRow."""
    blocks = list(_TAGGED.finditer(text))
    if not blocks:
        return text, []
    if text[blocks[-1].end() :].strip():
        raise BadRow(where, "has text after a <tool_call>; chat templates write an answer's text before its calls")
    return text[: blocks[0].start()].strip(), [_call(_literal(block[1], where), where) for block in blocks]


def _literal(text: str, where: str) -> Any:
    """JSON, or a Python literal as some of Hermes' rows have."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise BadRow(where, f"has a <tool_call> that can't be read: {quoted(text)}") from None


def responses_in_text(text: str) -> list[str]:
    """The replies of tools in a message: those in `<tool_response>` tags, or the whole text."""
    found = _RESPONSE.findall(text)
    return found if found and not _RESPONSE.sub("", text).strip() else [text]


def tools_in_prompt(prompt: str, where: str) -> tuple[str, tuple[dict[str, Any], ...]]:
    """A system prompt without Hermes' or Qwen's listing of the tools, which the chat template writes, and those tools.

    Any other prompt comes back whole, without tools.
    """
    listing = _LISTING.search(prompt)
    block = _TOOLS.search(listing[0]) if listing else None
    if listing is None or block is None:
        return prompt, ()
    text = block[1] if block[1].startswith("[") else f"[{','.join(block[1].splitlines())}]"
    tools = _literal(text, where)
    return (prompt[: listing.start()] + prompt[listing.end() :]).strip(), read_tools(tools, where)


def name_replies(messages: list[dict[str, Any]]) -> None:
    """Give the replies of tools the name of the call that they answer, by id or in order, where the row doesn't say it."""
    asked: list[tuple[str | None, str]] = []
    for message in messages:
        if message["role"] == "assistant":
            asked = [(call.get("id"), call["function"]["name"]) for call in message.get("tool_calls") or []]
        elif message["role"] == "tool" and asked:
            answered = message.get("tool_call_id")
            place = next((n for n, (name, _) in enumerate(asked) if answered and name == answered), 0)
            message.setdefault("name", asked.pop(place)[1])


def is_written(text: str, name: str, arguments: dict[str, Any]) -> bool:
    """Whether a rendered answer has this call in a form that parses back to the same name and arguments.

    Forms: JSON with name and arguments (Qwen, Hermes, Llama, Mistral), a name and then JSON (DeepSeek, GPT-OSS, Kimi), tags for
    each argument (Qwen3 Coder, Nemotron, GLM, Claude's), Python's (LFM2), and Gemma 4's.
    """
    return any(found == arguments for found in _json_calls(text, name)) or any(
        _same(found, arguments) for found in (*_tagged_calls(text, name), *_other_calls(text, name))
    )


def _json_calls(text: str, name: str) -> Iterator[Any]:
    decoder = json.JSONDecoder()
    for place in (found.start() for found in re.finditer(r"\{", text)):
        try:
            value, _ = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and any(value.get(key) == name for key in _NAMES):
            yield next((value[key] for key in _ARGUMENTS if key in value), None)
        if re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])[^{{}}]{{0,80}}$", text[max(0, place - len(name) - 82) : place]):
            yield value


def _tagged_calls(text: str, name: str) -> Iterator[dict[str, str]]:
    """Arguments as text, from one tag for each argument."""
    opening = (
        rf"<function={re.escape(name)}>|<[\w:|]*invoke name=\"{re.escape(name)}\">|<tool_call>\s*{re.escape(name)}\s*(?=<)"
    )
    for found in re.finditer(opening, text):
        rest = re.split(r"</function>|</[\w:|]*invoke>|</tool_call>(?!</)", text[found.end() :], maxsplit=1)[0]
        pairs = re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", rest, re.S)
        pairs += re.findall(r"<[\w:|]*parameter name=\"([^\"]+)\"[^>]*>(.*?)</[\w:|]*parameter>", rest, re.S)
        pairs += re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", rest, re.S)
        yield dict(pairs)


def _other_calls(text: str, name: str) -> Iterator[dict[str, Any]]:
    """Calls as in Python, and Gemma 4's `call:name{key:<|"|>text<|"|>}`."""
    for found in re.finditer(rf"(?<![\w.]){re.escape(name)}\(", text):
        for end in (place.end() for place in re.finditer(r"\)", text[found.start() :])):
            source = text[found.start() : found.start() + end]
            try:
                call = ast.parse(source, mode="eval").body
            except (SyntaxError, ValueError, MemoryError, RecursionError):
                continue
            if isinstance(call, ast.Call):
                yield {part.arg or "": _value(part.value) for part in call.keywords}
            break
    for found in re.finditer(rf"call:{re.escape(name)}(?=\{{)", text):
        parts = text[found.end() :].split('<|"|>')  # every second part is the text of a string
        strings, hidden = parts[1::2], "".join(f'"\0{n // 2}"' if n % 2 else part for n, part in enumerate(parts))
        quoted_keys = re.sub(r"([{,])\s*([^\s\"{}\[\],:]+):", r'\1"\2":', hidden)
        try:
            value, _ = json.JSONDecoder(strict=False).raw_decode(quoted_keys)
        except (ValueError, RecursionError):
            continue
        yield _restored(value, strings)


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _value(node: ast.AST) -> Any:
    """The value of a literal that may have JSON's names for constants inside."""
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List):
        return [_value(part) for part in node.elts]
    if isinstance(node, ast.Dict):
        return {_value(key): _value(part) for key, part in zip(node.keys, node.values, strict=True) if key is not None}
    try:
        return ast.literal_eval(node)  # type: ignore[arg-type]
    except (ValueError, TypeError):
        return NotImplemented


def _restored(value: Any, strings: list[str]) -> Any:
    if isinstance(value, str) and value.startswith("\0"):
        return strings[int(value[1:])]
    if isinstance(value, dict):
        return {key: _restored(part, strings) for key, part in value.items()}
    return [_restored(part, strings) for part in value] if isinstance(value, list) else value


def _same(found: dict[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether arguments are the same; a form that has them as text doesn't keep their types."""
    return found.keys() == arguments.keys() and all(
        found[name] == value or (isinstance(found[name], str) and _reads_as(found[name], value))
        for name, value in arguments.items()
    )


def _reads_as(text: str, value: Any) -> bool:
    if isinstance(value, str):
        return text.strip() == value.strip()
    try:
        return bool(json.loads(text) == value)
    except ValueError:
        return text in (str(value), str(value).lower())
