"""A row's conversation (OpenAI or ShareGPT style) -> messages for chat templates."""

from __future__ import annotations

import difflib
from typing import Any

from finetune.data.checks import BadRow, is_missing, kind_of, parsed_if_text, quoted, valid_text
from finetune.data.meaning import check_message
from finetune.data.tool_calls import calls_in_text, name_replies, read_calls, responses_in_text, tools_in_prompt

Message = dict[str, Any]

#: Role in the data -> role in chat templates.
ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function_call": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool", "ipython": "tool",
}  # fmt: skip
_OPENING = ("system", "developer")
_PASSED_ON = ("name", "tool_call_id")
#: Names of the reasoning before an answer; the template gets it under the name that it reads.
REASONING = ("reasoning_content", "reasoning", "thinking")
#: Names of a message's yes or no to training on it: OpenAI's, Axolotl's, ms-swift's and others'.
_TRAINED = ("weight", "train", "trainable", "training", "loss")
_READ = (*_PASSED_ON, *REASONING, *_TRAINED, "tool_calls", "function_call")


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


def read_tool_text(messages: list[Message], field: str) -> tuple[list[Message], tuple[dict[str, Any], ...]]:
    """The messages with tool calls, replies and lists of tools that are text in Hermes' tags as fields; and those tools.

    The chat template writes them in the model's own form. Raises BadRow.
    """
    read: list[Message] = []
    tools: tuple[dict[str, Any], ...] = ()
    for index, message in enumerate(messages):
        where, role, text = f"{field}[{index}].content", message["role"], message["content"]
        if role == "assistant" and "<tool_call>" in text and "tool_calls" not in message:
            text, calls = calls_in_text(text, where)
            read.append({**message, "content": text, "tool_calls": calls} if calls else message)
        elif role == "tool" and "<tool_response>" in text:
            read += [{**message, "content": reply} for reply in responses_in_text(text)]
        elif role in _OPENING and "<tools>" in text:
            text, found = tools_in_prompt(text, where)
            tools += found
            read += [{**message, "content": text}] if text else []
        else:
            read.append(message)
    name_replies(read)
    return read, tools


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
        raise BadRow(field, "has weight 0 or train: false on every assistant turn; there is nothing to train on")
    return trained


def _message(item: Any, where: str, role_key: str, content_key: str) -> Message:
    if not isinstance(item, dict):
        raise BadRow(where, f"is {kind_of(item)}, not a message with role and content")
    role_key = role_key if role_key in item else "from" if "from" in item else role_key
    content_key = content_key if content_key in item else "value" if "value" in item else content_key
    check_message(item, where, (*_READ, role_key, content_key))
    message: Message = {"role": _role(item.get(role_key), f"{where}.{role_key}")}
    if str(item.get(role_key)).strip().lower() == "function_call":
        message["tool_calls"] = read_calls(item.get(content_key), f"{where}.{content_key}")
        item = {**item, content_key: ""}
    for key in ("tool_calls", "function_call"):
        calls = parsed_if_text(item.get(key) or None, f"{where}.{key}")
        if calls and not is_missing(calls):
            message["tool_calls"] = [*message.get("tool_calls", []), *read_calls(calls, f"{where}.{key}")]
    message["content"] = _content(item, f"{where}.{content_key}", content_key, message)
    for key in _PASSED_ON:
        if not is_missing(item.get(key)):
            message[key] = valid_text(item[key], f"{where}.{key}")
    if reasoning := list(dict.fromkeys(item[key] for key in REASONING if item.get(key) and not is_missing(item[key]))):
        message["reasoning_content"] = valid_text(reasoning[0], f"{where}.{REASONING[0]}")
        if len(reasoning) > 1:
            raise BadRow(where, "has two different texts of reasoning")
    if not _is_trained(item, where, message["role"]):
        message["weight"] = 0
    return message


def _is_trained(item: dict[str, Any], where: str, role: str) -> bool:
    """Whether nothing in the message leaves it out of training. Raises BadRow for parts of a weight."""
    values = {}
    for key in _TRAINED:
        value = item.get(key)
        if is_missing(value):
            continue
        value = value.strip().lower() if isinstance(value, str) else value
        known = next(
            (n for n, same in enumerate(((0, 0.0, "0", "0.0", "false"), (1, 1.0, "1", "1.0", "true"))) if value in same), None
        )
        if known is None:
            raise BadRow(f"{where}.{key}", f"is {kind_of(item[key])}; a message is trained on or not: 1 or 0, true or false")
        values[key] = bool(known)
    if role != "assistant" and values.get("train"):
        raise BadRow(f"{where}.train", f"is true on a message of the {role}; only the assistant's can be trained on")
    return role != "assistant" or all(values.values())


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
