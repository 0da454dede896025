"""Read a preferred and a rejected answer to one prompt into fields of an Example."""

from __future__ import annotations

import contextlib
import re
from typing import Any

from finetune.data.checks import BadRow, Values, is_missing, optional_text, parse_if_text, required_text
from finetune.data.conversation import Columns, Message, answer_indices, message_keys, read_messages, read_tool_text
from finetune.data.tool_calls import read_tools

#: A turn of Anthropic's transcripts.
_TURN = re.compile(r"\n\n(Human|Assistant):")
_ROLES = {"Human": "user", "Assistant": "assistant"}
_ANSWERS = ("chosen", "rejected")
_EQUAL = "and rejected are equal; there is nothing to prefer"


def from_preference(row: Values, columns: Columns) -> Values:
    """Read a pair of answers. Raise BadRow."""
    # As TRL, LLaMA-Factory, Axolotl and ms-swift write pairs: the prompt in its own column (text, messages, instruction),
    # or each answer as the whole conversation, also as a transcript of "Human:" and "Assistant:".
    keys = message_keys(columns)
    prompt, tools = _prompt(row, keys)
    values = [_answer(row, field) for field in _ANSWERS]
    # trained on without a template
    if isinstance(prompt, str) and all(isinstance(value, str) for value in values):
        chosen, rejected = values
        if chosen.strip() == rejected.strip():
            raise BadRow("chosen", _EQUAL)
        return {"prompt": prompt, "completion": chosen, "rejected_completion": rejected}
    chosen, rejected = (_conversation(value, field, prompt, keys) for value, field in zip(values, _ANSWERS, strict=True))
    start = _end_of_prompt(chosen, rejected)
    answers = tuple(index for index in answer_indices(chosen, "chosen") if index >= start)
    answer_indices(rejected, "rejected")
    if not answers:
        raise BadRow("chosen", "has no assistant turn after the prompt; there is nothing to train on")
    return {"messages": tuple(chosen), "answers": answers, "tools": tools, "rejected": tuple(rejected[start:])}


def _prompt(row: Values, keys: tuple[str, str]) -> tuple[list[Message] | str | None, tuple[Values, ...]]:
    tools = read_tools(row.get("tools"), "tools")
    system = optional_text(row, "system")
    field = next((name for name in ("messages", "conversations", "prompt") if not is_missing(row.get(name))), None)
    value = row.get(field) if field else None
    if "instruction" in row and field is None:
        parts = (required_text(row, "instruction"), optional_text(row, "input"))
        value, field = [{"role": "user", "content": "\n\n".join(part for part in parts if part.strip())}], "instruction"
        keys = ("role", "content")
    if isinstance(value, str) and field == "prompt":
        if not system.strip():
            return required_text(row, "prompt"), tools
        value = [{keys[0]: "user", keys[1]: value}]
    if value is None:
        # the answers contain the prompt
        return None, tools
    messages, listed_tools = read_tool_text(
        read_messages([value] if isinstance(value, dict) else value, field or "", keys), field or ""
    )
    if system.strip() and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    return messages, tools or listed_tools


def _answer(row: Values, field: str) -> Any:
    value = row[field]
    if isinstance(value, str) and value.lstrip().startswith(("[{", "{")):
        with contextlib.suppress(BadRow):  # it is plain text
            value = parse_if_text(value, field)
    return [value] if isinstance(value, dict) else value if isinstance(value, list) else required_text(row, field)


def _conversation(value: Any, field: str, prompt: list[Message] | str | None, keys: tuple[str, str]) -> list[Message]:
    if isinstance(value, str):
        if prompt is None:
            return _transcript(value, field)
        messages: list[Message] = [{"role": "assistant", "content": value}]
    else:
        messages, _ = read_tool_text(read_messages(value, field, keys), field)
    before: list[Message] = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt or [])
    if messages[0]["role"] == "assistant":
        if not before:
            raise BadRow(field, "begins with the answer, and the row has no prompt")
        return [*before, *messages]
    asked = [message["content"].strip() for message in before if message["role"] == "user"]
    if asked and asked[-1] not in [message["content"].strip() for message in messages if message["role"] == "user"]:
        raise BadRow(field, "is a whole conversation, and its prompt is not the row's")
    return messages


def _transcript(text: str, field: str) -> list[Message]:
    _, *parts = _TURN.split(text if text.startswith("\n\n") else f"\n\n{text}")
    if not parts:
        raise BadRow(field, "is an answer without a prompt: name the prompt's column  dataset.columns={prompt: ...}")
    turns = zip(parts[::2], parts[1::2], strict=True)
    return read_messages([{"role": _ROLES[name], "content": content.strip()} for name, content in turns], field)


def _end_of_prompt(chosen: list[Message], rejected: list[Message]) -> int:
    # the first message that differs must be an answer in both
    pairs = zip(chosen, rejected, strict=False)
    start = next((index for index, (message, other) in enumerate(pairs) if message != other), min(len(chosen), len(rejected)))
    if start == len(chosen) == len(rejected):
        raise BadRow("chosen", _EQUAL)
    if start in (len(chosen), len(rejected)):
        raise BadRow("chosen", "and rejected differ only in what follows the answers")
    if not chosen[start]["role"] == rejected[start]["role"] == "assistant":
        raise BadRow("chosen", f"and rejected differ in the prompt, at message {start}; only answers may differ")
    return start
