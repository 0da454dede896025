"""A row of any format as `Example`, and the reader of its conversation (OpenAI or ShareGPT style)."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from finetune.data.checks import BadRow, Values, is_missing, parse_if_text, quoted, type_phrase, valid_json, valid_text
from finetune.data.column_semantics import REASONING, meaning_of
from finetune.data.pictures.placement import PICTURE_MARK, PICTURE_PARTS, PictureReference, part_reference
from finetune.data.tool_calls import calls_in_text, name_replies, read_calls, responses_in_text, tools_in_prompt

if TYPE_CHECKING:
    from finetune.data.pictures.source import PictureSource

Message = dict[str, Any]
Columns = dict[str, str]  # field of a format -> the recipe's column
#: Role in the data -> role in chat templates.
ROLES = {
    name: names.split()[0]
    for names in (
        "system", "developer", "user human prompter", "assistant gpt chatgpt bot model function_call",
        "tool function observation function_response ipython",
    )
    for name in names.split()
}  # fmt: skip
_SYSTEM_ROLES = ("system", "developer")
_COPIED_KEYS = ("name", "tool_call_id")
#: Keys of the reasoning before an answer. Each chat template gets the key that it reads.
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
#: Keys that say whether a message is trained on, from Axolotl, ms-swift, OpenAI and others.
_FLAG_KEYS, _WEIGHT_KEYS = ("train", "trainable", "training", "loss"), ("weight", "loss_weight")
_FLAG_SPELLINGS = {False: (0, "0", "0.0", "false"), True: (1, "1", "1.0", "true")}
_MESSAGE_KEYS = (*_COPIED_KEYS, *THOUGHT_KEYS, *_FLAG_KEYS, *_WEIGHT_KEYS, "tool_calls", "function_call")


@dataclass(frozen=True)
class Example:
    """One row: messages, prompt and completion, or text."""

    file: str  # where the row is
    row: int
    messages: tuple[Message, ...] = ()
    answers: tuple[int, ...] = ()  # indices of the messages to train on
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    rejected: tuple[Message, ...] = ()  # the rejected answer of a pair, as messages or as a completion
    rejected_completion: str | None = None
    desirable: bool | None = None  # whether the answer is marked good; None for rows without a label
    pictures: tuple[PictureSource, ...] = ()  # an image for each mark in the texts, in order (`pictures.placement`)

    @property
    def is_pair(self) -> bool:
        return bool(self.rejected) or self.rejected_completion is not None

    def pair(self) -> tuple[Example, Example]:
        """Return the example of the chosen answer, and of the rejected answer."""
        chosen = replace(self, rejected=(), rejected_completion=None)
        if not self.messages:
            return chosen, replace(chosen, completion=self.rejected_completion)
        start = self.answers[0]
        messages = (*self.messages[:start], *self.rejected)
        answers = tuple(index for index in range(start, len(messages)) if messages[index]["role"] == "assistant")
        return chosen, replace(chosen, messages=messages, answers=answers)

    def content(self) -> dict[str, Any]:
        """Return the fields that are equal for duplicate rows."""
        fields = ("messages", "answers", "tools", "prompt", "completion", "text", "rejected", "rejected_completion")
        content = {name: getattr(self, name) for name in fields if getattr(self, name)}
        if self.pictures:
            content["pictures"] = [picture.digest for picture in self.pictures]
        return content if self.desirable is None else content | {"desirable": self.desirable}

    def question(self) -> list[Message] | str:
        """Return the messages before the last answer, or the prompt."""
        return list(self.messages[: self.answers[-1]]) if self.messages else self.prompt or ""

    def texts(self) -> list[str]:
        messages = (*self.messages, *self.rejected)
        texts = (self.prompt, self.completion, self.text, self.rejected_completion)
        return [*(message["content"] for message in messages), *filter(None, texts)]

    def reference(self) -> str | None:
        """Return the text of the last answer; None for plain text and for tool calls alone."""
        if not self.messages:
            return self.completion
        last = self.messages[self.answers[-1]]
        return None if last.get("tool_calls") and not last["content"].strip() else last["content"]


def used_fields(fields: Values, ignored: Collection[str], as_json: Collection[str] = ()) -> Values:
    """Return a row's or message's fields without ignored ones, with values of JSON columns as text. Raise BadRow."""
    if "reasoning_content" in ignored:  # reasoning is ignored under any name
        ignored = {*ignored, *(name for name in fields if meaning_of(name) == REASONING)}
    used = {name: value for name, value in fields.items() if name not in ignored}
    for name in used.keys() & {*as_json}:
        if not isinstance(used[name], str) and not is_missing(used[name]):
            used[name] = json.dumps(valid_json(used[name], name), ensure_ascii=False)
    return used


class MessageReader:
    """Read a row's messages, and collect the fields that are not read."""

    def __init__(
        self, columns: Columns | None = None, ignored: Collection[str] = (), json_columns: Collection[str] = ()
    ) -> None:
        columns = columns or {}
        self._keys = columns.get("role", "role"), columns.get("content", "content")
        # fields that every message needs stay, if a column of the same name is ignored
        self._ignored, self._json_columns = {*ignored} - {"role", "content", "from", "value"}, json_columns
        self.unread: list[Values] = []  # for each message

    def read(self, value: Any, field: str) -> list[Message]:
        """Read the messages in a row's `field`, a list or its JSON. Raise BadRow."""
        value = parse_if_text(value, field)
        if not isinstance(value, list):
            raise BadRow(field, f"is {type_phrase(value)}{'' if is_missing(value) else ', not a list of messages'}")
        if not value:
            raise BadRow(field, "is empty")
        messages: list[Message] = []
        for index, turn in enumerate(value):
            path = f"{field}[{index}]"
            if not isinstance(turn, dict):
                raise BadRow(path, f"is {type_phrase(turn)}, not a message with role and content")
            used = used_fields(turn, self._ignored, self._json_columns)
            role_key, content_key = self._keys
            if role_key not in used and "from" in used:  # ShareGPT's keys
                role_key = "from"
            if content_key not in used and "value" in used:
                content_key = "value"
            messages.append(_message(used, path, role_key, content_key))
            read_keys = {*_MESSAGE_KEYS, role_key, content_key}
            self.unread.append({name: item for name, item in used.items() if name not in read_keys})
        return messages


def read_tool_text(messages: list[Message], field: str) -> tuple[list[Message], tuple[Values, ...]]:
    """Return messages with Hermes' tagged calls and replies as fields, and the tagged tools. Raise BadRow."""
    converted: list[Message] = []
    tools: tuple[Values, ...] = ()
    for index, message in enumerate(messages):
        path, role, text = f"{field}[{index}].content", message["role"], message["content"]
        if role == "assistant" and "<tool_call>" in text and "tool_calls" not in message:
            text, calls = calls_in_text(text, path)
            converted.append({**message, "content": text, "tool_calls": calls} if calls else message)
        elif role == "tool" and "<tool_response>" in text:
            converted += [{**message, "content": reply} for reply in responses_in_text(text)]
        elif role in _SYSTEM_ROLES and "<tools>" in text:
            text, listed_tools = tools_in_prompt(text, path)
            tools += listed_tools
            converted += [{**message, "content": text}] if text else []
        else:
            converted.append(message)
    name_replies(converted)
    return converted, tools


def answer_indices(messages: list[Message], field: str) -> tuple[int, ...]:
    """Return indices of the assistant messages to train on. Raise BadRow."""
    first_turn = next((index for index, message in enumerate(messages) if message["role"] not in _SYSTEM_ROLES), None)
    if first_turn is None:
        raise BadRow(field, "has only a system prompt; there is no assistant turn to train on")
    speaker = {"assistant": "the assistant", "tool": "a tool"}.get(messages[first_turn]["role"])
    has_question = "user" in [message["role"] for message in messages[:-1]]
    if speaker == "a tool" or (speaker and not has_question):  # the chat template checks the rest of the order
        raise BadRow(f"{field}[{first_turn}].role", f"{speaker} speaks first, and there is no user message to answer")
    assistant_turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not assistant_turns:
        raise BadRow(field, "has no assistant turn; there is nothing to train on")
    # `weight: 0` leaves an answer out; chat templates don't get the key
    trained = tuple(index for index in assistant_turns if messages[index].pop("weight", 1) != 0)
    if not trained:
        raise BadRow(field, "has weight 0 or train: false on every assistant turn; there is nothing to train on")
    return trained


def _message(source: Values, path: str, role_key: str, content_key: str) -> Message:
    role = source.get(role_key)
    if not isinstance(role, str):
        raise BadRow(f"{path}.{role_key}", f"is {type_phrase(role)}{'' if is_missing(role) else ', not a role'}")
    if role.strip().lower() not in ROLES:
        matches = difflib.get_close_matches(role.lower()[:40], ROLES, n=1)
        hint = f"did you mean {matches[0]}?" if matches else "roles are system, user, assistant, tool"
        raise BadRow(f"{path}.{role_key}", f"unknown role {quoted(role)}; {hint}")
    message: Message = {"role": ROLES[role.strip().lower()]}
    if role.strip().lower() == "function_call":
        message["tool_calls"] = read_calls(source.get(content_key), f"{path}.{content_key}")
        source = {**source, content_key: ""}
    for key in ("tool_calls", "function_call"):
        calls = parse_if_text(source.get(key) or None, f"{path}.{key}")
        if calls and not is_missing(calls):
            message["tool_calls"] = [*message.get("tool_calls", []), *read_calls(calls, f"{path}.{key}")]
    message["content"] = _content(source, f"{path}.{content_key}", content_key, message)
    for key in _COPIED_KEYS:
        if not is_missing(source.get(key)):
            message[key] = valid_text(source[key], f"{path}.{key}")
    thoughts = list(dict.fromkeys(source[key] for key in THOUGHT_KEYS if source.get(key) and not is_missing(source[key])))
    if thoughts:
        message["reasoning_content"] = valid_text(thoughts[0], f"{path}.{THOUGHT_KEYS[0]}")
    if len(thoughts) > 1:
        raise BadRow(path, "has two different reasoning texts")
    if not _is_trained(source, path, message["role"]):
        message["weight"] = 0
    return message


def _is_trained(source: Values, path: str, role: str) -> bool:
    flags = {}
    for key in (*_FLAG_KEYS, *_WEIGHT_KEYS):
        value = source.get(key)
        if is_missing(value):
            continue
        value = value.strip().lower() if isinstance(value, str) else value
        flag = next((flag for flag, spellings in _FLAG_SPELLINGS.items() if value in spellings), None)
        if flag is None:
            raise BadRow(f"{path}.{key}", f"is {type_phrase(source[key])}; write 1 or 0, or true or false")
        flags[key] = flag
    # a weight of 1 is the default, so other messages may have it
    true_key = next((key for key in _FLAG_KEYS if flags.get(key)), None)
    if role != "assistant" and true_key:
        raise BadRow(f"{path}.{true_key}", f"is true on a {role} message; only assistant messages can be trained on")
    return role != "assistant" or all(flags.values())


def _content(source: Values, path: str, key: str, message: Message) -> str:
    value = source.get(key)
    if is_missing(value):
        if "tool_calls" in message:
            return ""
        raise BadRow(path, f"is {type_phrase(value)}")
    if isinstance(value, list):
        pictures: list[PictureReference | int | None] = []
        value = "".join(_part_text(part, f"{path}[{index}]", pictures) for index, part in enumerate(value))
        if pictures:
            message["pictures"] = pictures
    text = valid_text(value, path)
    # tool replies, system prompts and tool calls may be empty
    if not text.strip() and message["role"] not in ("tool", *_SYSTEM_ROLES) and "tool_calls" not in message:
        raise BadRow(path, "the answer is empty" if message["role"] == "assistant" else "is empty")
    return text


def _part_text(part: Any, path: str, pictures: list[PictureReference | int | None]) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind in ("text", "input_text", "output_text"):
        return valid_text(part.get("text"), f"{path}.text")
    if kind in PICTURE_PARTS:
        # the index of an image in the row's column
        index = part.get("index")
        pictures.append(part_reference(part, path) or (index if isinstance(index, int) else None))
        return PICTURE_MARK
    description = f"a part of type {quoted(kind)}" if isinstance(kind, str) else type_phrase(part)
    raise BadRow(path, f"is {description}; only text and images can be trained on")
