"""A row's conversation (OpenAI or ShareGPT style) -> messages for chat templates."""

from __future__ import annotations

import difflib
from typing import Any

from finetune.data.checks import BadRow, is_missing, kind_of, parsed_if_text, quoted, valid_json, valid_text

Message = dict[str, Any]

#: Role in the data -> role in chat templates.
ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function_call": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool",
}  # fmt: skip
_OPENING = ("system", "developer")
_PASSED_ON = ("name", "tool_call_id", "reasoning_content")


def read_messages(value: Any, field: str, role_key: str = "role", content_key: str = "content") -> list[Message]:
    """The messages in a row's `field`, with the roles of chat templates. Raises BadRow with the place inside the field.

    A message has `role`/`content`, `from`/`value`, or the keys given. JSON in a string is parsed first.
    """
    value = parsed_if_text(value, field)
    if is_missing(value):
        raise BadRow(field, f"is {kind_of(value)}")
    if not isinstance(value, list):
        raise BadRow(field, f"is {kind_of(value)}, not a list of messages")
    if not value:
        raise BadRow(field, "is empty")
    return [_message(item, f"{field}[{index}]", role_key, content_key) for index, item in enumerate(value)]


def answers_of(messages: list[Message], field: str) -> tuple[int, ...]:
    """Indices of the assistant messages to train on; `weight: 0` leaves one out. Raises BadRow.

    After the system prompt the user must speak first; the chat template checks the rest of the order.
    """
    start = next((index for index, message in enumerate(messages) if message["role"] not in _OPENING), None)
    if start is None:
        raise BadRow(field, "has only a system prompt; there is no assistant turn to train on")
    if messages[start]["role"] == "assistant":
        raise BadRow(f"{field}[{start}].role", "the assistant speaks first; a conversation begins with the user")
    if messages[start]["role"] == "tool":
        raise BadRow(f"{field}[{start}].role", "a tool speaks first; a conversation begins with the user")
    turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise BadRow(field, "has no assistant turn; there is nothing to train on")
    trained = tuple(index for index in turns if messages[index].pop("weight", 1) != 0)
    if not trained:
        raise BadRow(field, "has weight 0 on every assistant turn; there is nothing to train on")
    return trained


def _message(item: Any, where: str, role_key: str, content_key: str) -> Message:
    if not isinstance(item, dict):
        raise BadRow(where, f"is {kind_of(item)}, not a message with role and content")
    role_key = role_key if role_key in item else "from" if "from" in item else role_key
    content_key = content_key if content_key in item else "value" if "value" in item else content_key
    message: Message = {"role": _role(item.get(role_key), f"{where}.{role_key}")}
    calls = parsed_if_text(item.get("tool_calls"), f"{where}.tool_calls")
    if calls and not is_missing(calls):
        if not isinstance(calls, list):
            raise BadRow(f"{where}.tool_calls", f"is {kind_of(calls)}, not a list")
        message["tool_calls"] = [valid_json(call, f"{where}.tool_calls") for call in calls]
    message["content"] = _content(item, f"{where}.{content_key}", content_key, message)
    for key in _PASSED_ON:
        if not is_missing(item.get(key)):
            message[key] = valid_text(item[key], f"{where}.{key}")
    if message["role"] == "assistant" and not is_missing(item.get("weight")):
        message["weight"] = item["weight"]
    return message


def _role(value: Any, where: str) -> str:
    if is_missing(value):
        raise BadRow(where, f"is {kind_of(value)}")
    if not isinstance(value, str):
        raise BadRow(where, f"is {kind_of(value)}, not a role")
    role = ROLES.get(value.strip().lower())
    if role is None:
        close = difflib.get_close_matches(value.lower()[:40], ROLES, n=1)
        hint = f"did you mean {close[0]}?" if close else "roles are system, user, assistant, tool"
        raise BadRow(where, f"unknown role {quoted(value)}; {hint}")
    return role


def _content(item: dict[str, Any], where: str, key: str, message: Message) -> str:
    """The text of a message. It may be empty only in tool replies, system prompts and tool calls."""
    value = item.get(key)
    may_be_empty = message["role"] in ("tool", *_OPENING) or "tool_calls" in message
    if is_missing(value):
        if "tool_calls" in message:
            return ""
        raise BadRow(where, f"is {kind_of(value)}")
    text = "".join(_part(part, f"{where}[{n}]") for n, part in enumerate(value)) if isinstance(value, list) else value
    text = valid_text(text, where)
    if not text.strip() and not may_be_empty:
        raise BadRow(where, "the answer is empty" if message["role"] == "assistant" else "is empty")
    return text


def _part(part: Any, where: str) -> str:
    if isinstance(part, dict) and part.get("type") in ("text", "input_text", "output_text"):
        return valid_text(part.get("text"), f"{where}.text")
    what = (
        f"a part of type {quoted(part['type'])}"
        if isinstance(part, dict) and isinstance(part.get("type"), str)
        else kind_of(part)
    )
    raise BadRow(where, f"is {what}; only text can be trained on")
