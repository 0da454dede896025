"""Row formats, their detection by columns, and their conversion to `Example`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from finetune.data.checks import ROW_LIMIT, BadRow, is_missing, optional_text, parse_if_text, required_text, type_phrase
from finetune.data.conversation import Message, answer_indices, message_keys, read_messages, read_tool_text
from finetune.data.example import Example
from finetune.data.preferences import from_preference
from finetune.data.report import printable
from finetune.data.tool_calls import read_calls, read_tools
from finetune.errors import DataError


@dataclass(frozen=True)
class Format:
    """A format's required and optional columns, an example line, and its parser (row -> fields of Example).

    `message_columns`: those that may have messages, whose fields that nothing reads are reported.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    example_line: str
    parse: Callable[[dict[str, Any], dict[str, str]], dict[str, Any]]
    message_columns: tuple[str, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns that it reads."""
        return (*self.required, *self.optional)


def _from_messages(row: dict[str, Any], columns: dict[str, str], field: str = "messages") -> dict[str, Any]:
    messages = read_messages(row.get(field), field, message_keys(columns))
    system = optional_text(row, "system")
    if system.strip() and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    elif system.strip() and system.strip() != messages[0]["content"].strip():
        raise BadRow("system", "differs from the system prompt in the conversation")
    messages, listed_tools = read_tool_text(messages, field)
    return {"messages": tuple(messages), "answers": answer_indices(messages, field), "tools": _tools(row) or listed_tools}


def _from_alpaca(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """Instruction and input become the user's message, the output the assistant's; `history`: earlier pairs, not trained on."""
    parts = (optional_text(row, "instruction"), optional_text(row, "input"))
    answer = required_text(row, "output")
    question = "\n\n".join(part for part in parts if part.strip())
    if not question:
        required_text(row, "instruction")
    messages: list[Message] = []
    if (system := optional_text(row, "system")).strip():
        messages.append({"role": "system", "content": system})
    history = parse_if_text(row.get("history") or None, "history")
    for index, pair in enumerate([] if is_missing(history) else history if isinstance(history, list) else [history]):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise BadRow(f"history[{index}]", f"is {type_phrase(pair)}, not a pair of question and answer")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": required_text({f"history[{index}]": text}, f"history[{index}]")})
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": tuple(messages), "answers": (len(messages) - 1,)}


def _from_prompt_completion(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """Two texts, concatenated without a template; or two lists of messages."""
    if isinstance(row.get("prompt"), (list, dict)) or isinstance(row.get("completion"), (list, dict)):
        keys = message_keys(columns)
        fields = (("prompt", "user"), ("completion", "assistant"))
        prompt, completion = (read_messages(_message_list(row.get(field), role), field, keys) for field, role in fields)
        prompt, listed_tools = read_tool_text(prompt, "prompt")
        messages, _ = read_tool_text([*prompt, *completion], "prompt")
        answers = tuple(index for index in answer_indices(messages, "prompt") if index >= len(prompt))
        if not answers:
            raise BadRow("completion", "has no assistant turn; there is nothing to train on")
        return {"messages": tuple(messages), "answers": answers, "tools": _tools(row) or listed_tools}
    return {"prompt": required_text(row, "prompt"), "completion": required_text(row, "completion")}


def _message_list(value: Any, role: str) -> Any:
    """A list of messages, also where it is one message or, beside a list, its text."""
    return [value] if isinstance(value, dict) else [{"role": role, "content": value}] if isinstance(value, str) else value


def _from_xlam(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    calls = read_calls(row["answers"], "answers")
    if not calls:
        raise BadRow("answers", "has no call; there is nothing to train on")
    question = {"role": "user", "content": required_text(row, "query")}
    messages = (question, {"role": "assistant", "content": "", "tool_calls": calls})
    return {"messages": messages, "answers": (1,), "tools": _tools(row)}


def filled(rows: Iterable[dict[str, Any]]) -> set[str]:
    """The columns in which a row has a value."""
    return {name for row in rows for name, value in row.items() if not is_missing(value)}


def _tools(row: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return read_tools(row.get("tools"), "tools") or read_tools(row.get("functions"), "functions")


#: Format of the answer of a labelled row -> the columns by which it is known.
LABELLED_ANSWERS = {
    "messages": ("messages",), "sharegpt": ("conversations",), "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}  # fmt: skip
_LABELS = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}  # 1 and 1.0 equal True


def _from_labelled(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """A row with one answer, marked good or bad. Of a conversation the last answer is meant; of a completion all of it."""
    label = row["label"]
    key = label.strip().lower() if isinstance(label, str) else label
    if not isinstance(key, (bool, int, float, str)) or key not in _LABELS:
        raise BadRow("label", f"is {type_phrase(label)}, not true or false" if key != "" else "is empty")
    filled_columns = filled([row])
    name = next((name for name, needed in LABELLED_ANSWERS.items() if filled_columns.issuperset(needed)), None)
    if name is None:
        raise BadRow(None, "has no answer: the columns are prompt and completion, messages, or instruction and output")
    fields = FORMATS[name].parse(row, columns)
    if name != "prompt_completion":
        fields["answers"] = fields["answers"][-1:]
    return {**fields, "desirable": _LABELS[key]}


FORMATS = {
    "messages": Format(
        ("messages",), ("system", "tools", "functions"),
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}', _from_messages,
        ("messages",),
    ),
    "sharegpt": Format(
        ("conversations",), ("system", "tools", "functions"),
        '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}',
        partial(_from_messages, field="conversations"), ("conversations",),
    ),
    "alpaca": Format(
        ("instruction", "output"), ("input", "system", "history"),
        '{"instruction": "Say hello", "input": "", "output": "Hello!"}', _from_alpaca,
    ),
    "prompt_completion": Format(
        ("prompt", "completion"), ("tools",), '{"prompt": "Q: 2+2?\\nA:", "completion": " 4"}', _from_prompt_completion,
        ("prompt", "completion"),
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
        '{"prompt": "Say hello", "chosen": "Hello!", "rejected": "Go away."}', from_preference,
        ("messages", "conversations", "prompt", "chosen", "rejected"),
    ),
    "labelled": Format(
        ("label",),
        (
            "prompt", "completion", "messages", "conversations", "instruction", "input", "output", "system", "history", "tools",
            "functions",
        ),
        '{"prompt": "Say hello", "completion": "Hello!", "label": true}', _from_labelled,
        ("messages", "conversations", "prompt", "completion"),
    ),
}  # fmt: skip
FIELDS = sorted({"role", "content", "images"}.union(*(fmt.columns for fmt in FORMATS.values())))

#: Field -> column of a question and its answer under other names, read as alpaca.
_QUESTION_ANSWER_COLUMNS: tuple[dict[str, str], ...] = (
    {"instruction": "instruction", "output": "response", "input": "context"},
    {"instruction": "instruction", "output": "response"},
    {"instruction": "question", "output": "answer"},
    {"instruction": "question", "output": "response"},
    {"instruction": "query", "output": "response"},
    {"instruction": "query", "output": "answer"},
    {"instruction": "prompt", "output": "response"},
    {"instruction": "prompt", "output": "answer"},
)


class UnknownColumns(DataError):
    """Columns that no format has, or not the one that the recipe names."""


def _formats_with(columns: set[str]) -> list[str]:
    """The formats by these columns; a label alone may be a class."""
    return [name for name, fmt in FORMATS.items() if name != "labelled" and columns.issuperset(fmt.required)]


def usual_columns(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Field -> column for rows whose columns are a question and its answer under usual names, such as question and answer.

    They become conversations, as chat sends them. Columns of a format, and others, map to nothing.
    """
    filled_columns = filled(rows)
    if _formats_with(filled_columns):
        return {}
    return next((columns for columns in _QUESTION_ANSWER_COLUMNS if filled_columns.issuperset(columns.values())), {})


def rename_columns(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """The row with the user's column names replaced by the format's. `columns` is field -> the user's column."""
    mapped = {field: row[column] for field, column in columns.items() if column in row}
    return {name: value for name, value in row.items() if name not in columns.values()} | mapped


def detect(rows: list[dict[str, Any]], file: str) -> str:
    """The format that most of `rows` (already renamed) have. Raises UnknownColumns when none fits, DataError when several do.

    A `text` column next to another format's columns is ignored: many published datasets have one as a copy.
    """
    counts: Counter[str] = Counter()
    for row in rows:
        matching = _formats_with(filled([row]))
        matching = matching if len(matching) == 1 else [name for name in matching if name != "text"]
        if len(matching) > 1:
            names = " and ".join(matching)
            raise DataError(
                f"{file}: the columns ({_column_list(rows)}) fit more than one format: {names}",
                f"Choose one, for example  dataset.format={matching[0]}",
            )
        counts.update(matching)
    if not counts:
        counts.update(_formats_with({name for row in rows for name in row}))
    if not counts:
        raise UnknownColumns(f"{file}: no known format has these columns: {_column_list(rows)}", _FORMATS_HINT)
    return counts.most_common(1)[0][0]


def check_columns(rows: list[dict[str, Any]], file: str, format_name: str, columns: dict[str, str]) -> None:
    """Raises DataError when a named format or the user's mapping needs columns that no row has. `rows` as read."""
    header = {key for row in rows for key in row}
    for field, column in columns.items():
        if field not in FIELDS:
            raise DataError(
                f"dataset.columns: '{printable(field)}' is not a field of any format", f"The fields are {', '.join(FIELDS)}."
            )
        if column not in header and field not in ("role", "content"):
            raise DataError(
                f"{file}: dataset.columns maps {field} to a column '{printable(column)}', "
                f"and the file has {_column_list(rows)}",
                "Use a column name of the file.",
            )
    required = FORMATS[format_name].required if format_name in FORMATS else ()
    missing = [column for column in required if column not in {*header, *columns}]
    if missing:
        raise UnknownColumns(
            f"{file}: format {format_name} needs the column(s) {', '.join(missing)}; the file has {_column_list(rows)}",
            _FORMATS_HINT,
        )


def parse(row: dict[str, Any], format_name: str, columns: dict[str, str], file: str, number: int) -> Example:
    """One renamed row as an Example. Raises BadRow."""
    fmt = FORMATS[format_name]
    missing = [column for column in fmt.required if column not in row]
    if missing:
        raise BadRow(missing[0], f"is missing; the row has {_column_list([row])} and the file is read as {format_name}")
    example = Example(file=file, row=number, **fmt.parse(row, columns))
    texts = [*(message["content"] for message in example.messages), example.prompt or "", example.completion or ""]
    if (size := sum(map(len, texts))) > ROW_LIMIT:
        raise BadRow(None, f"has {size:,} characters; the limit of one row is {ROW_LIMIT:,}")
    return example


def unused_columns(columns: Iterable[str], format_name: str, read: Iterable[str]) -> tuple[str, ...]:
    """Columns of the (renamed) rows that the format does not read, without those in `read`, which are read beside it."""
    names = {*FORMATS[format_name].columns, *read}
    return tuple(dict.fromkeys(printable(column) for column in columns if column not in names))


def _column_list(rows: list[dict[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    names = ", ".join(printable(name) or "(no name)" for name in columns[:20])
    return f"{names}, ... ({len(columns)} in all)" if len(columns) > 20 else names or "no columns"


_FORMATS_HINT = "\n".join([
    "Rows look like one of these, or name your own columns with dataset.columns (field: your column):",
    *(f"  {name}: {fmt.example_line}" for name, fmt in FORMATS.items()),
])  # fmt: skip
