"""Which settings would read rows that can't be read as they are. Each is tried on the rows before it is suggested."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from finetune.data.checks import is_missing
from finetune.data.column_kinds import is_harmless, kinds_of
from finetune.data.column_semantics import PreferenceData
from finetune.data.formats import FORMATS, UnknownColumns
from finetune.data.readers import Row
from finetune.data.report import Refused, printable
from finetune.data.row_parser import RowParser, choose_parser
from finetune.data.unused_columns import ColumnUse
from finetune.errors import DataError
from finetune.settings import DatasetRecipe
from finetune.settings.methods import METHOD_FORMATS

#: Names of questions and of answers, the usual ones first.
_QUESTIONS = re.findall(
    r"\w+",
    "instruction question query prompt problem request user human input source article document dialogue dialog passage "
    "inputs sentence message text content title frage",
)
_ANSWERS = re.findall(
    r"\w+",
    "output answer response completion solution assistant bot reply target highlights summary translation outputs gold label "
    "category sentiment class intent antwort",
)
_MAX_SUGGESTIONS = 2
#: Settings of `dataset` by name, and what they would do.
Suggestion = tuple[str, dict[str, Any]]


def override(name: str, value: Any) -> str:
    """A setting of `dataset` as an argument to type."""
    return shlex.quote(f"dataset.{name}={_flow(value)}")


def advice_for(error: DataError, rows: list[Row], file: str, dataset: DatasetRecipe) -> DataError:
    """The error of rows that can't be read, with settings that read them in front of its fix."""
    values = [row.values for row in rows]
    fixes = [error.fix]
    if isinstance(error, PreferenceData):
        names = {"chosen": error.chosen, "rejected": error.rejected}
        fixes[0] += "" if error.chosen == "chosen" else f"  {override('columns', names)}"
        fixes += _lines(_chosen_answers(values, **names), rows, file, dataset)[:1]
    elif isinstance(error, UnknownColumns) and dataset.format not in METHOD_FORMATS:
        fixes = [*_lines(_unknown_columns(values), rows, file, dataset), error.fix]
    return DataError(error.problems, "\n".join(fixes))


def advice_for_unused(asked: dict[str, ColumnUse], rows: list[Row], parser: RowParser, dataset: DatasetRecipe) -> list[str]:
    """What to type for columns and fields that stop a run: settings that use them, and the one that leaves them out."""
    columns = [name for name in asked if any(name in row.values for row in rows)]
    leave_out = f"To leave it out on purpose:  {override('ignore_columns', [*dataset.ignore_columns, *asked])}"
    return [*_lines(_unused_columns(columns, asked, parser), rows, parser.file, dataset), leave_out]


def json_advice(refused: Iterable[Refused], dataset: DatasetRecipe) -> list[str]:
    """The setting that writes as JSON what isn't text; nothing where no row is refused for that."""
    fields = [row.field for row in refused if row.field and re.fullmatch("is .*, not text", row.reason)]
    names = list(dict.fromkeys(field.rpartition(".")[2] for field in fields if not field.endswith("]")))
    return [f"To write them as JSON:  {override('json_columns', [*dataset.json_columns, *names])}"] if names else []


def _lines(suggestions: Iterable[Suggestion], rows: list[Row], file: str, dataset: DatasetRecipe) -> list[str]:
    lines: list[str] = []
    for reason, settings in suggestions:
        if len(lines) < _MAX_SUGGESTIONS and (complete := _tried(settings, rows, file, dataset)):
            arguments = "  ".join(override(name, value) for name, value in complete.items())
            lines.append(f"{reason}:  {arguments}")
    return list(dict.fromkeys(lines))


def _tried(settings: dict[str, Any], rows: list[Row], file: str, dataset: DatasetRecipe) -> dict[str, Any]:
    for json_columns in ([], [column for field, column in settings["columns"].items() if field in ("output", "completion")]):
        tried = {**settings, "json_columns": json_columns} if json_columns else dict(settings)
        if dataset.format != "auto" or "format" in tried:
            tried.setdefault("format", "auto")
        for _ in range(3):  # columns that aren't used then, too, are left out
            try:
                parser = choose_parser(file, [row.values for row in rows], dataset.model_copy(update=tried))
                batch = replace(parser, reads_pictures=False).parse(list(rows))
            except DataError:
                return {}
            unused = parser.unused()
            unused.values.merge(batch.unused)
            asked = unused.asked(len(rows))
            if not asked:
                break
            tried["ignore_columns"] = [*tried.get("ignore_columns", dataset.ignore_columns), *asked]
        if not asked and 2 * len(batch.examples) >= len(rows):
            return tried
    return {}


def _unknown_columns(rows: list[dict[str, Any]]) -> Iterator[Suggestion]:
    values = {name: value for row in reversed(rows) for name, value in row.items() if not is_missing(value)}
    for name, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            field = "conversations" if "from" in value[0] else "messages"
            yield "Perhaps", {"columns": {field: name}}
    texts = [name for name, value in values.items() if isinstance(value, str)]
    if pair := _question_and_answer(values):
        columns = dict(zip(("instruction", "output"), pair, strict=True))
        others = [
            name for name in texts if name not in pair and not is_harmless(name, kinds_of(name, values[name]), has_answer=True)
        ]
        if len(others) == 1 and others[0] != "system":
            yield "Perhaps", {"columns": {**columns, "input": others[0]}}
        yield "Perhaps", {"columns": columns}
    elif len(texts) == 2:
        reason = f"If {printable(texts[1])} is the answer to {printable(texts[0])}"
        yield reason, {"columns": {"instruction": texts[0], "output": texts[1]}}
    elif len(texts) == 1:
        yield f"To learn {printable(texts[0])} as plain text", {"format": "text", "columns": {"text": texts[0]}}


def _unused_columns(columns: list[str], asked: dict[str, ColumnUse], parser: RowParser) -> Iterator[Suggestion]:
    names = {field: parser.columns.get(field, field) for field in (*FORMATS[parser.format].required, "input", "system")}
    if parser.format == "text":
        pair = _question_and_answer([names["text"], *columns])
        answers = [pair[1]] if pair and pair[0] == names["text"] else []
        for answer in [*answers, *(name for name in columns if name not in answers)][:_MAX_SUGGESTIONS]:
            reason = f"If {printable(answer)} is the answer to {printable(names['text'])}"
            yield reason, {"columns": {"instruction": names["text"], "output": answer}}
        return
    prompts = [name for name in columns if "truth" not in asked[name].kinds]
    if parser.format in ("alpaca", "prompt_completion") and "input" not in parser.columns:
        fields = dict(zip(("instruction", "output"), (names[field] for field in FORMATS[parser.format].required), strict=True))
        for name in prompts[:1]:
            yield f"If {printable(name)} belongs to the question", {"columns": {**fields, "input": name}}
    elif parser.format in ("messages", "sharegpt"):
        for name in prompts:
            if "system" in name.lower():
                yield f"If {printable(name)} is the system prompt", {"columns": {**parser.columns, "system": name}}


def _chosen_answers(rows: list[dict[str, Any]], chosen: str, rejected: str) -> Iterator[Suggestion]:
    reason = "To train on the chosen answers"
    ignored = {"ignore_columns": [rejected]}
    yield reason, {"format": "messages", "columns": {"messages": chosen}, **ignored}
    for column in ("conversations", "messages", "prompt", "instruction", "question", "query"):
        value = next((row[column] for row in rows if not is_missing(row.get(column))), None)
        if isinstance(value, list):
            yield reason, {"format": "prompt_completion", "columns": {"prompt": column, "completion": chosen}, **ignored}
        elif isinstance(value, str) and value.strip():
            yield reason, {"format": "alpaca", "columns": {"instruction": column, "output": chosen}, **ignored}
    yield f"{reason} with their prompts, as plain text", {"format": "text", "columns": {"text": chosen}, **ignored}


def _question_and_answer(columns: Iterable[str]) -> tuple[str, str] | None:
    """The columns that look like a question and its answer by their names, whatever their case and spaces."""
    columns = list(columns)
    question = _first_named(columns, _QUESTIONS)
    answer = _first_named([name for name in columns if name != question], _ANSWERS)
    return (question, answer) if question is not None and answer is not None else None


def _first_named(columns: list[str], names: Iterable[str]) -> str | None:
    for words_of in (lambda name: {name.strip().lower()}, lambda name: set(re.findall(r"[a-z]+", name.lower()))):
        for wanted in names:
            if (column := next((name for name in columns if wanted in words_of(name)), None)) is not None:
                return column
    return None


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_flow(key)}: {_flow(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    is_plain = re.fullmatch(r"[A-Za-z_](?:[\w.-]| (?=\w))*", value, re.ASCII) and value.lower() not in _NOT_TEXT
    return value if is_plain else json.dumps(value, ensure_ascii=not value.isprintable())


_NOT_TEXT = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
