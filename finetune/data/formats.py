"""Row formats, their detection by columns, and their conversion to `Example`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from finetune.data.checks import ROW_LIMIT, BadRow, is_missing, kind_of, optional_text, parsed_if_text, text_of
from finetune.data.conversation import Message, answers_of, read_messages, read_tool_text
from finetune.data.report import shown
from finetune.data.tool_calls import read_calls, read_tools
from finetune.errors import DataError


@dataclass(frozen=True)
class Example:
    """One row, whatever its format: messages, prompt and completion, or text.

    `answers` are the indices of the messages to train on; `file` and `row` its origin.
    """

    file: str
    row: int
    messages: tuple[Message, ...] = ()
    answers: tuple[int, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None

    def content(self) -> dict[str, Any]:
        """The content without its origin; equal for duplicate rows."""
        fields = ("messages", "answers", "tools", "prompt", "completion", "text")
        return {name: getattr(self, name) for name in fields if getattr(self, name)}

    def question(self) -> list[Message] | str:
        """The messages before the last answer, or the prompt; empty for plain text."""
        return list(self.messages[: self.answers[-1]]) if self.messages else self.prompt or ""

    def texts(self) -> list[str]:
        """All its texts."""
        return [*(message["content"] for message in self.messages), *filter(None, (self.prompt, self.completion, self.text))]

    def said(self) -> list[str]:
        """Its texts without those of the system."""
        return [
            *(message["content"] for message in self.messages if message["role"] not in ("system", "developer")),
            *filter(None, (self.prompt, self.completion, self.text)),
        ]

    def reference(self) -> str | None:
        """The last answer of the row; None for plain text, and where the answer is only a call of a tool."""
        if not self.messages:
            return self.completion
        last = self.messages[self.answers[-1]]
        return None if last.get("tool_calls") and not last["content"].strip() else last["content"]


@dataclass(frozen=True)
class Format:
    """A format's required and optional columns, an example line, and its parser (row -> fields of Example)."""

    needs: tuple[str, ...]
    reads: tuple[str, ...]
    line: str
    parse: Callable[[dict[str, Any], dict[str, str]], dict[str, Any]]


def _from_messages(row: dict[str, Any], columns: dict[str, str], field: str = "messages") -> dict[str, Any]:
    messages = read_messages(row.get(field), field, columns.get("role", "role"), columns.get("content", "content"))
    system = optional_text(row, "system")
    if system.strip() and messages[0]["role"] not in ("system", "developer"):
        messages.insert(0, {"role": "system", "content": system})
    elif system.strip() and system.strip() != messages[0]["content"].strip():
        raise BadRow("system", "differs from the system prompt in the conversation")
    messages, listed = read_tool_text(messages, field)
    return {"messages": tuple(messages), "answers": answers_of(messages, field), "tools": _tools(row) or listed}


def _from_sharegpt(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    return _from_messages(row, columns, "conversations")


def _from_alpaca(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """Instruction and input become the user's message, the output the assistant's; `history`: earlier pairs, not trained on."""
    instruction, extra, answer = optional_text(row, "instruction"), optional_text(row, "input"), text_of(row, "output")
    question = "\n\n".join(part for part in (instruction, extra) if part.strip())
    if not question:
        text_of(row, "instruction")
    messages: list[Message] = []
    if (system := optional_text(row, "system")).strip():
        messages.append({"role": "system", "content": system})
    history = parsed_if_text(row.get("history") or None, "history")
    for index, pair in enumerate([] if is_missing(history) else history if isinstance(history, list) else [history]):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise BadRow(f"history[{index}]", f"is {kind_of(pair)}, not a pair of question and answer")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            messages.append({"role": role, "content": text_of({f"history[{index}]": text}, f"history[{index}]")})
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": tuple(messages), "answers": (len(messages) - 1,)}


def _from_prompt_completion(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """Two texts, concatenated without a template; or two lists of messages."""
    if isinstance(row.get("prompt"), (list, dict)) or isinstance(row.get("completion"), (list, dict)):
        keys = columns.get("role", "role"), columns.get("content", "content")
        sides = (("prompt", "user"), ("completion", "assistant"))
        prompt, completion = (read_messages(_turns(row.get(field), role), field, *keys) for field, role in sides)
        prompt, listed = read_tool_text(prompt, "prompt")
        messages, _ = read_tool_text([*prompt, *completion], "prompt")
        answers = tuple(index for index in answers_of(messages, "prompt") if index >= len(prompt))
        if not answers:
            raise BadRow("completion", "has no assistant turn; there is nothing to train on")
        return {"messages": tuple(messages), "answers": answers, "tools": _tools(row) or listed}
    return {"prompt": text_of(row, "prompt"), "completion": text_of(row, "completion")}


def _turns(value: Any, role: str) -> Any:
    """A list of messages, also where it is one message or, beside a list, its text."""
    return [value] if isinstance(value, dict) else [{"role": role, "content": value}] if isinstance(value, str) else value


def _from_text(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    return {"text": text_of(row, "text")}


def _from_xlam(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """A question and the calls that answer it, with the tools to choose from."""
    calls = read_calls(row["answers"], "answers")
    if not calls:
        raise BadRow("answers", "has no call; there is nothing to train on")
    messages = ({"role": "user", "content": text_of(row, "query")}, {"role": "assistant", "content": "", "tool_calls": calls})
    return {"messages": messages, "answers": (1,), "tools": _tools(row)}


def _tools(row: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    return read_tools(row.get("tools"), "tools") or read_tools(row.get("functions"), "functions")


FORMATS = {
    "messages": Format(
        ("messages",), ("system", "tools", "functions"),
        '{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}', _from_messages,
    ),
    "sharegpt": Format(
        ("conversations",), ("system", "tools", "functions"),
        '{"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]}', _from_sharegpt,
    ),
    "alpaca": Format(
        ("instruction", "output"), ("input", "system", "history"),
        '{"instruction": "Say hello", "input": "", "output": "Hello!"}', _from_alpaca,
    ),
    "prompt_completion": Format(
        ("prompt", "completion"), ("tools",), '{"prompt": "Q: 2+2?\\nA:", "completion": " 4"}', _from_prompt_completion
    ),
    "xlam": Format(
        ("query", "answers"), ("tools",),
        '{"query": "Where is 7?", "tools": [...], "answers": [{"name": "track", "arguments": {"parcel": 7}}]}', _from_xlam,
    ),
    "text": Format(("text",), (), '{"text": "Any text; all of it is trained on."}', _from_text),
}  # fmt: skip
FIELDS = sorted({name for known in FORMATS.values() for name in (*known.needs, *known.reads)} | {"role", "content"})

#: Field -> column of a question and its answer under other names, read as alpaca.
_PAIRS: tuple[dict[str, str], ...] = (
    {"instruction": "instruction", "output": "response", "input": "context"},
    {"instruction": "instruction", "output": "response"},
    {"instruction": "question", "output": "answer"},
    {"instruction": "question", "output": "response"},
    {"instruction": "query", "output": "response"},
    {"instruction": "query", "output": "answer"},
    {"instruction": "prompt", "output": "response"},
    {"instruction": "prompt", "output": "answer"},
)
#: Common column names -> the format and mapping to suggest.
_SUGGESTIONS = (
    (("conversation",), "sharegpt", ("conversations",)),
    (("dialogue",), "messages", ("messages",)),
    (("content",), "text", ("text",)),
)


def usual_columns(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Field -> column for rows whose columns are a question and its answer under usual names, such as question and answer.

    They become conversations, as chat sends them. Columns of a format, and others, map to nothing.
    """
    header = {name for row in rows for name, value in row.items() if not is_missing(value)}
    if any(header.issuperset(known.needs) for known in FORMATS.values()):
        return {}
    return next((columns for columns in _PAIRS if header.issuperset(columns.values())), {})


def renamed(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """The row with the user's column names replaced by the format's. `columns` is field -> the user's column."""
    mapped = {field: row[column] for field, column in columns.items() if column in row}
    taken = {column for field, column in columns.items() if column in row}
    return {**{name: value for name, value in row.items() if name not in taken}, **mapped}


def detect(rows: list[dict[str, Any]], file: str, columns: dict[str, str]) -> str:
    """The format that most of `rows` (already renamed) have. Raises DataError when none or more than one fits.

    A `text` column next to another format's columns is ignored: many published datasets have one as a copy.
    """
    fits: Counter[str] = Counter()
    for row in rows:
        filled = {name for name, value in row.items() if not is_missing(value)}
        matching = [name for name, known in FORMATS.items() if filled.issuperset(known.needs)]
        matching = matching if len(matching) == 1 else [name for name in matching if name != "text"]
        if len(matching) > 1:
            both = " and ".join(matching)
            raise DataError(
                f"{file}: the columns ({_listed(rows)}) fit more than one format: {both}",
                f"Choose one, for example  dataset.format={matching[0]}",
            )
        fits.update(matching)
    if not fits:
        header = {name for row in rows for name in row}
        fits.update(name for name, known in FORMATS.items() if header.issuperset(known.needs))
    if not fits:
        raise DataError(f"{file}: no known format has these columns: {_listed(rows)}", _how_to_name(rows, columns))
    return fits.most_common(1)[0][0]


def check_columns(rows: list[dict[str, Any]], file: str, name: str, columns: dict[str, str]) -> None:
    """Raises DataError when a named format or the user's mapping needs columns that no row has. `rows` as read."""
    header = {key for row in rows for key in row}
    for field, column in columns.items():
        if field not in FIELDS:
            raise DataError(
                f"dataset.columns: '{shown(field)}' is not a field of any format", f"The fields are {', '.join(FIELDS)}."
            )
        if column not in header and field not in ("role", "content"):
            raise DataError(
                f"{file}: dataset.columns maps {field} to a column '{shown(column)}', and the file has {_listed(rows)}",
                "Use a column name of the file.",
            )
    absent = [need for need in FORMATS[name].needs if need not in {*header, *columns}] if name in FORMATS else []
    if absent:
        raise DataError(
            f"{file}: format {name} needs the column(s) {', '.join(absent)}; the file has {_listed(rows)}",
            _how_to_name(rows, columns),
        )


def parse(row: dict[str, Any], name: str, columns: dict[str, str], file: str, number: int) -> Example:
    """One renamed row as an Example. Raises BadRow."""
    known = FORMATS[name]
    absent = [need for need in known.needs if need not in row]
    if absent:
        raise BadRow(absent[0], f"is missing; the row has {_listed([row])} and the file is read as {name}")
    example = Example(file=file, row=number, **known.parse(row, columns))
    size = sum(len(message["content"]) for message in example.messages) + len(
        (example.prompt or "") + (example.completion or "")
    )
    if size > ROW_LIMIT:
        raise BadRow(None, f"has {size:,} characters; the limit of one row is {ROW_LIMIT:,}")
    return example


def unused_columns(header: list[str], name: str) -> tuple[str, ...]:
    """Columns of the (renamed) rows that the format does not read."""
    known = FORMATS[name]
    return tuple(shown(column) for column in header if column not in (*known.needs, *known.reads))


def _listed(rows: list[dict[str, Any]]) -> str:
    header = list(dict.fromkeys(name for row in rows for name in row))
    names = ", ".join(shown(name) or "(no name)" for name in header[:20])
    return f"{names}, ... ({len(header)} in all)" if len(header) > 20 else names or "no columns"


def _how_to_name(rows: list[dict[str, Any]], columns: dict[str, str]) -> str:
    header = {name for row in rows for name in row}
    lines = []
    for seen, name, fields in _SUGGESTIONS:
        if header.issuperset(seen) and not columns:
            mapping = ", ".join(f"{field}: {column}" for field, column in zip(fields, seen, strict=True))
            lines += ["Perhaps, in the recipe:", f"  dataset: {{path: ..., format: {name}, columns: {{{mapping}}}}}"]
            break
    lines.append("Rows look like one of these, or name your own columns with dataset.columns (field: your column):")
    return "\n".join([*lines, *(f"  {name}: {known.line}" for name, known in FORMATS.items())])
