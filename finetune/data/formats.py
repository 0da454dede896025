"""Detect row formats by columns, and convert rows to `Example`."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from finetune.data.checks import ROW_LIMIT, BadRow, Values, is_missing, optional_text, parse_if_text, required_text, type_phrase
from finetune.data.conversation import Example, Message, MessageReader, answer_indices, read_tool_text
from finetune.data.report import printable
from finetune.data.tool_calls import read_calls, read_tools


@dataclass(frozen=True)
class Format:
    """Columns, example line and parser of a format."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    example_line: str
    parse: Callable[[Values, MessageReader], Values]  # turns a row into keyword arguments of Example

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.required, *self.optional)


def _from_messages(row: Values, reader: MessageReader, field: str = "messages") -> Values:
    messages = _add_system(row, reader.read(row.get(field), field))
    messages, tools = _extract_tools(row, messages, field)
    return {"messages": tuple(messages), "answers": answer_indices(messages, field), "tools": tools}


def _add_system(row: Values, messages: list[Message]) -> list[Message]:
    system = optional_text(row, "system")
    if not system.strip():
        return messages
    if messages[0]["role"] not in ("system", "developer"):
        return [{"role": "system", "content": system}, *messages]
    if system.strip() != messages[0]["content"].strip():
        raise BadRow("system", "differs from the system prompt in the conversation")
    return messages


def _extract_tools(row: Values, messages: list[Message], field: str) -> tuple[list[Message], tuple[Values, ...]]:
    messages, tools_in_text = read_tool_text(messages, field)
    return messages, _tools_column(row) or tools_in_text


def _tools_column(row: Values) -> tuple[Values, ...]:
    return read_tools(row.get("tools"), "tools") or read_tools(row.get("functions"), "functions")


def _instruction(row: Values) -> str:
    texts = (optional_text(row, "instruction"), optional_text(row, "input"))
    # without texts `required_text` raises BadRow
    return "\n\n".join(text for text in texts if text.strip()) or required_text(row, "instruction")


def _from_alpaca(row: Values, _reader: MessageReader) -> Values:
    answer = required_text(row, "output")
    question = {"role": "user", "content": _instruction(row)}
    messages: list[Message] = []
    # `history`: earlier pairs of question and answer
    history = parse_if_text(row.get("history") or None, "history")
    if not isinstance(history, list):
        history = [] if is_missing(history) else [history]
    for index, pair in enumerate(history):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise BadRow(f"history[{index}]", f"is {type_phrase(pair)}, not a pair of question and answer")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": required_text({f"history[{index}]": text}, f"history[{index}]")})
    messages = _add_system(row, [*messages, question, {"role": "assistant", "content": answer}])
    reasoning = optional_text(row, "reasoning")
    thought, end_of_thought, _ = answer.partition("</think>")
    if end_of_thought and reasoning.strip() not in thought:
        raise BadRow("reasoning", "differs from the reasoning in the answer, before </think>")
    if reasoning.strip() and not end_of_thought:
        messages[-1]["reasoning_content"] = reasoning
    return {"messages": tuple(messages), "answers": (len(messages) - 1,)}


def _as_messages(value: Any, field: str, role: str, reader: MessageReader) -> list[Message]:
    if isinstance(value, str):
        return [{"role": role, "content": required_text({field: value}, field)}]
    return reader.read([value] if isinstance(value, dict) else value, field)


def _answers_after(start: int, messages: list[Message], field: str) -> tuple[int, ...]:
    answers = tuple(index for index in answer_indices(messages, field) if index >= start)
    if not answers:
        raise BadRow(field, "has no assistant turn after the prompt; there is nothing to train on")
    return answers


def _from_prompt_completion(row: Values, reader: MessageReader) -> Values:
    if not any(isinstance(row.get(field), (list, dict)) for field in ("prompt", "completion")):
        # two texts are concatenated without a template
        return {"prompt": required_text(row, "prompt"), "completion": required_text(row, "completion")}
    prompt, tools = _extract_tools(row, _as_messages(row.get("prompt"), "prompt", "user", reader), "prompt")
    completion = _as_messages(row.get("completion"), "completion", "assistant", reader)
    messages, _ = read_tool_text([*prompt, *completion], "prompt")
    return {"messages": tuple(messages), "answers": _answers_after(len(prompt), messages, "prompt"), "tools": tools}


def _from_xlam(row: Values, _: MessageReader) -> Values:
    calls = read_calls(row["answers"], "answers")
    if not calls:
        raise BadRow("answers", "has no call; there is nothing to train on")
    question = {"role": "user", "content": required_text(row, "query")}
    messages = (question, {"role": "assistant", "content": "", "tool_calls": calls})
    return {"messages": messages, "answers": (1,), "tools": _tools_column(row)}


_TURN = re.compile(r"\n\n(Human|Assistant):")  # a turn of Anthropic's transcripts
_EQUAL = "equals rejected; there is nothing to prefer"


def _from_preference(row: Values, reader: MessageReader) -> Values:
    # As TRL, LLaMA-Factory, Axolotl and ms-swift write pairs: the prompt in its own column (text, messages, instruction),
    # or each answer as the whole conversation, also as a transcript of "Human:" and "Assistant:".
    chosen, rejected = _answer(row, "chosen"), _answer(row, "rejected")
    prompt, tools = list[Message](), _tools_column(row)
    field = next((name for name in ("messages", "conversations", "prompt") if not is_missing(row.get(name))), "instruction")
    if field in row:
        value = _instruction(row) if field == "instruction" else row[field]
        if field in ("messages", "conversations"):
            value = parse_if_text(value, field)
        messages = _add_system(row, _as_messages(value, field, "user", reader))
        prompt, tools = _extract_tools(row, messages, field)
        # three texts are trained on without a template
        if field == "prompt" and len(messages) == 1 and all(isinstance(text, str) for text in (value, chosen, rejected)):
            if chosen.strip() == rejected.strip():
                raise BadRow("chosen", _EQUAL)
            return {"prompt": value, "completion": chosen, "rejected_completion": rejected}
    chosen_messages = _conversation(chosen, "chosen", prompt, reader)
    rejected_messages = _conversation(rejected, "rejected", prompt, reader)
    start = _end_of_prompt(chosen_messages, rejected_messages)
    answer_indices(rejected_messages, "rejected")  # raises BadRow
    answers = _answers_after(start, chosen_messages, "chosen")
    rejected_answer = tuple(rejected_messages[start:])
    return {"messages": tuple(chosen_messages), "answers": answers, "tools": tools, "rejected": rejected_answer}


def _answer(row: Values, field: str) -> Any:
    value = row[field]
    if isinstance(value, str) and value.lstrip().startswith(("[{", "{")):
        with contextlib.suppress(BadRow):  # plain text that begins with a bracket
            value = parse_if_text(value, field)
    return value if isinstance(value, (list, dict)) else required_text(row, field)


def _conversation(value: Any, field: str, prompt: list[Message], reader: MessageReader) -> list[Message]:
    # the prompt and the answer; the value may be the answer alone, or a whole conversation
    if isinstance(value, str) and not prompt:
        _, *parts = _TURN.split(value if value.startswith("\n\n") else f"\n\n{value}")
        if not parts:
            raise BadRow(field, "is an answer without a prompt: name the prompt's column  dataset.columns={prompt: ...}")
        turns = zip(parts[::2], parts[1::2], strict=True)
        return MessageReader().read([{"role": speaker, "content": content.strip()} for speaker, content in turns], field)
    messages = _as_messages(value, field, "assistant", reader)
    if not isinstance(value, str):
        messages, _ = read_tool_text(messages, field)
    if messages[0]["role"] == "assistant":
        if not prompt:
            raise BadRow(field, "begins with the answer, and the row has no prompt")
        return [*prompt, *messages]
    prompt_questions = [message["content"].strip() for message in prompt if message["role"] == "user"]
    questions = [message["content"].strip() for message in messages if message["role"] == "user"]
    if prompt_questions and prompt_questions[-1] not in questions:
        raise BadRow(field, "is a whole conversation, and its prompt is not the row's")
    return messages


def _end_of_prompt(chosen: list[Message], rejected: list[Message]) -> int:
    # the first message that differs must be an answer in both
    shorter = min(len(chosen), len(rejected))
    start = next((index for index in range(shorter) if chosen[index] != rejected[index]), shorter)
    if start == len(chosen) == len(rejected):
        raise BadRow("chosen", _EQUAL)
    if start == shorter:
        raise BadRow("chosen", "differs from rejected only after the answers")
    if not chosen[start]["role"] == rejected[start]["role"] == "assistant":
        raise BadRow("chosen", f"differs from rejected in the prompt, at message {start}; only answers may differ")
    return start


def columns_with_values(rows: Iterable[Values]) -> set[str]:
    """Return the columns that have a value in some row."""
    return {name for row in rows for name, value in row.items() if not is_missing(value)}


#: Formats in which a labelled row may have its answer.
LABELLED_ANSWERS = ("messages", "sharegpt", "prompt_completion", "alpaca")
_LABELS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}  # 1 and 1.0 equal True


def _from_labelled(row: Values, reader: MessageReader) -> Values:
    label = row["label"]
    key = label.strip().lower() if isinstance(label, str) else label
    if not isinstance(key, (int, float, str)) or key not in _LABELS:
        raise BadRow("label", f"is {type_phrase(label)}, not true or false" if key != "" else "is empty")
    filled_columns = columns_with_values([row])
    name = next((name for name in LABELLED_ANSWERS if filled_columns.issuperset(FORMATS[name].required)), None)
    if name is None:
        raise BadRow(None, "has no answer: the columns are prompt and completion, messages, or instruction and output")
    fields = FORMATS[name].parse(row, reader)
    if name != "prompt_completion":  # the label is for the last answer of a conversation, or a whole completion
        fields["answers"] = fields["answers"][-1:]
    return {**fields, "desirable": _LABELS[key]}


#: By name; `RowFormat` in settings/schema.py lists the names for recipes.
FORMATS = {
    "messages": Format(
        ("messages",), ("system", "tools", "functions"),
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}', _from_messages,
    ),
    "sharegpt": Format(
        ("conversations",), ("system", "tools", "functions"),
        '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}',
        partial(_from_messages, field="conversations"),
    ),
    "alpaca": Format(
        ("instruction", "output"), ("input", "reasoning", "system", "history"),
        '{"instruction": "Say hello", "input": "", "output": "Hello!"}', _from_alpaca,
    ),
    "prompt_completion": Format(
        ("prompt", "completion"), ("tools",), '{"prompt": "Q: 2+2?\\nA:", "completion": " 4"}', _from_prompt_completion,
    ),
    "xlam": Format(
        ("query", "answers"), ("tools",),
        '{"query": "Where is 7?", "tools": [...], "answers": [{"name": "track", "arguments": {"parcel": 7}}]}', _from_xlam,
    ),
    "text": Format(
        ("text",), (), '{"text": "Any text; all of it is trained on."}', lambda row, _: {"text": required_text(row, "text")}
    ),
    "preference": Format(
        ("chosen", "rejected"), ("prompt", "messages", "conversations", "instruction", "input", "system", "tools"),
        '{"prompt": "Say hello", "chosen": "Hello!", "rejected": "Go away."}', _from_preference,
    ),
    "labelled": Format(
        ("label",),
        (
            "prompt", "completion", "messages", "conversations", "instruction", "input", "output", "system", "history", "tools",
            "functions",
        ),
        '{"prompt": "Say hello", "completion": "Hello!", "label": true}', _from_labelled,
    ),
}  # fmt: skip


def parse(row: Values, format_name: str, file: str, number: int, reader: MessageReader | None = None) -> Example:
    """Convert a row whose columns have the format's names. Raise BadRow."""
    fmt = FORMATS[format_name]
    missing = [column for column in fmt.required if column not in row]
    if missing:
        raise BadRow(missing[0], f"is missing; the row has {column_list([row])} and the file is read as {format_name}")
    example = Example(file=file, row=number, **fmt.parse(row, reader or MessageReader()))
    texts = [*(message["content"] for message in example.messages), example.prompt or "", example.completion or ""]
    if (size := sum(map(len, texts))) > ROW_LIMIT:
        raise BadRow(None, f"has {size:,} characters; the limit of one row is {ROW_LIMIT:,}")
    return example


def column_list(rows: list[Values]) -> str:
    """List the names of the first columns for a message."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    names = ", ".join(printable(name) or "(no name)" for name in columns[:20])
    return f"{names}, ... ({len(columns)} in all)" if len(columns) > 20 else names or "no columns"
