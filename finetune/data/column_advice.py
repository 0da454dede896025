"""Suggest settings that read rows which no format reads; they are tried on the rows first."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

from finetune.data.checks import Values, is_blank, is_missing
from finetune.data.column_semantics import CONTEXT, JUDGEMENTS, REASONING, describe, is_harmless, kinds_of, meaning_of, words_of
from finetune.data.formats import FORMATS
from finetune.data.readers import Row
from finetune.data.report import Refused, printable
from finetune.data.row_parser import PreferenceData, RowParser, UnknownColumns, choose_parser, transcript_error, transcripts
from finetune.data.sources import find_sources
from finetune.errors import DataError
from finetune.settings import DatasetRecipe
from finetune.settings.methods import METHOD_FORMATS

#: Words in names of questions, answers (usual ones first), reasoning and scores.
_QUESTIONS, _ANSWERS, _THOUGHTS, _SCORES = (
    words.split()
    for words in (
        "instruction question query prompt problem request user human input source article document dialogue dialog passage "
        "inputs sentence message text content title frage context background paragraph evidence knowledge facts premise code "
        "documents kontext options choices",
        "output answer response completion solution assistant bot reply target highlights summary translation outputs gold "
        "label category sentiment class intent antwort reference truth explanation justification analysis derivation",
        "reasoning cot thinking thought thoughts think rationale scratchpad gedanken",
        "score scores rating ratings rate reward rewards grade grades quality confidence rank helpfulness feedback critique "
        "judgement judgment evaluation stars",
    )
)
#: Rows that are read for the kinds of a column's values.
_KIND_ROWS = 20
#: A reason, and settings of `dataset` by name.
Suggestion = tuple[str, Values]
#: Part of a row -> its columns, by names and values; columns that may be any part are under an empty text.
Parts = defaultdict[str, list[str]]


def override(name: str, value: Any) -> str:
    """Return a setting of `dataset` as an argument to type."""
    return shlex.quote(f"dataset.{name}={_flow(value)}")


def first_rows(dataset: DatasetRecipe) -> list[Row]:
    """Return the first rows of a dataset, unchanged. Raise DataError."""
    rows = (row for source in find_sources(dataset.path, dataset) for row in source.rows() if isinstance(row, Row))
    return list(itertools.islice(rows, _KIND_ROWS))


def roles_of(rows: list[Row], dataset: DatasetRecipe) -> tuple[dict[str, str], bool]:
    """Return the alpaca field of each column, or `ignore`, and whether these are guesses."""
    values = [row.values for row in rows]
    columns = list(dict.fromkeys(name for row in values for name in row))
    # nested values are conversations, which have no alpaca fields
    if any(not isinstance(value, str | int | float | None) for row in values for value in row.values()):
        return {}, False
    asked, fields = columns, dataset.columns
    try:
        parser = choose_parser("", values, dataset)
        if parser.format != "alpaca":
            return {}, False
        asked = [*parser.parse([*rows]).unused.asked()]
        fields = {name: name for name in columns if name in FORMATS["alpaca"].columns} | parser.columns
        # a context is the only unused column that is read without asking
        suggestions = [item for item in _unused_columns(asked, parser, values) if "input" in item[1]["columns"]]
    except DataError:
        suggestions = [*_questions(_by_part(columns, values))]
    is_guess = bool(asked) and not dataset.columns
    if is_guess:
        fields = _first_that_reads(suggestions, rows, "", dataset)[1].get("columns", fields)
    read = {column: field for field, column in fields.items()}
    return {name: read.get(name, "ignore") for name in columns}, is_guess


def advice_for(error: DataError, rows: list[Row], file: str, dataset: DatasetRecipe) -> DataError:
    """Put settings that read the rows in front of an error's fix."""
    values = [row.values for row in rows]
    fixes = [error.fix]
    if isinstance(error, PreferenceData):
        fixes[0] += "" if error.columns["chosen"] == "chosen" else f"  {override('columns', error.columns)}"
        fixes += _lines(_chosen_answers(values, **error.columns), rows, file, dataset)
    elif isinstance(error, UnknownColumns) and dataset.format not in METHOD_FORMATS:
        lines = _lines(_unknown_columns(values), rows, file, dataset)
        if not lines and (talks := transcripts(values, values[0])):
            return transcript_error(file, talks[0])
        fixes = [*lines, error.fix]
    return DataError(error.problems, "\n".join(fixes))


def advice_for_unused(asked: Collection[str], rows: list[Row], parser: RowParser, dataset: DatasetRecipe) -> list[str]:
    """Return settings that use, or leave out, columns that stop a run."""
    leave_out = f"To leave it out:  {override('ignore_columns', [*dataset.ignore_columns, *asked])}"
    suggestions = _unused_columns(asked, parser, [row.values for row in rows])
    return [*_lines(suggestions, rows, parser.file, dataset), leave_out]


def json_advice(refused: Iterable[Refused], dataset: DatasetRecipe) -> list[str]:
    """Return the setting that writes non-text values as JSON."""
    fields = [row.field for row in refused if row.field and re.fullmatch("is .*, not text", row.reason)]
    names = list(dict.fromkeys(field.rpartition(".")[2] for field in fields if not field.endswith("]")))
    return [f"To write them as JSON:  {override('json_columns', [*dataset.json_columns, *names])}"] if names else []


def _lines(suggestions: Iterable[Suggestion], rows: list[Row], file: str, dataset: DatasetRecipe) -> list[str]:
    reason, settings = _first_that_reads(suggestions, rows, file, dataset)
    return [f"{reason}:  {'  '.join(override(name, value) for name, value in settings.items())}"] if settings else []


def _first_that_reads(suggestions: Iterable[Suggestion], rows: list[Row], file: str, dataset: DatasetRecipe) -> Suggestion:
    readable = ((reason, tried) for reason, settings in suggestions if (tried := _tried(settings, rows, file, dataset)))
    return next(readable, ("", {}))


def _tried(settings: Values, rows: list[Row], file: str, dataset: DatasetRecipe) -> Values:
    columns = settings["columns"]
    hidden = {"system", "input", "reasoning"} & {*columns} - {*columns.values()}  # that would be read from other columns
    if any(not is_blank(row.values.get(name)) for row in rows for name in hidden - {*dataset.columns}):
        return {}
    for json_columns in ([], [column for field, column in columns.items() if field in ("output", "completion")]):
        tried = {**settings, "json_columns": json_columns} if json_columns else dict(settings)
        if dataset.format != "auto":
            tried.setdefault("format", "auto")
        for _ in range(3):  # columns that aren't used then, too, are left out
            try:
                parser = choose_parser(file, [row.values for row in rows], dataset.model_copy(update=tried))
                batch = replace(parser, reads_pictures=False).parse(list(rows))
            except DataError:
                return {}
            if not (asked := batch.unused.asked()):
                break
            tried["ignore_columns"] = [*tried.get("ignore_columns", dataset.ignore_columns), *asked]
        if not asked and 2 * len(batch.examples) >= len(rows):
            return tried
    return {}


def _unknown_columns(rows: list[Values]) -> Iterator[Suggestion]:
    values = _first_values(rows)
    for name, value in values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            field = "conversations" if "from" in value[0] else "messages"
            yield "Perhaps", {"columns": {field: name}}
    parts = _by_part(values, rows)
    yield from _questions(parts)
    texts = [name for part, names in parts.items() if part != "other" for name in names]
    if len(texts) == 1 and not transcripts(rows, texts):
        yield f"To train on {printable(texts[0])} as plain text", {"format": "text", "columns": {"text": texts[0]}}


def _first_values(rows: list[Values]) -> Values:
    return {name: value for row in reversed(rows) for name, value in row.items() if not is_missing(value)}


def _by_part(columns: Iterable[str], rows: list[Values]) -> Parts:
    parts = Parts(list)
    for name in columns:
        parts[_part_of(name, rows)].append(name)
    return parts


def _part_of(name: str, rows: list[Values]) -> str:
    values = [row[name] for row in rows[:_KIND_ROWS] if not is_missing(row.get(name))]
    kinds = set[str]().union(*(kinds_of(name, value) for value in values))
    name_words, meaning = {*words_of(name), *re.findall(r"[^\W\d_]+", name.lower())}, meaning_of(name)
    is_answer = bool(name_words & {*_ANSWERS}) and not name_words & {"options", "choices"}
    is_text = any(isinstance(value, str) for value in values) and "text" in describe(kinds)
    if name_words & {*_SCORES} or is_harmless(name, kinds, has_answer=not is_answer):
        return "other"
    if is_text and (meaning == REASONING or name_words & {*_THOUGHTS}):
        return "reasoning"
    if is_answer:
        return "answer"
    if not is_text or meaning not in ("", CONTEXT) or name_words & JUDGEMENTS:
        return "other"
    if meaning or name_words & {*_QUESTIONS}:
        return "system" if "system" in name.lower() else "prompt"
    # T-1, T-2, T-3
    if kinds == {"token"} and len({*map(str, values)}) == len(values) > 2:
        return "other"
    return "transcript" if transcripts(rows, [name]) else ""


def _questions(parts: Parts, question: str | None = None, answer: str | None = None) -> Iterator[Suggestion]:
    question = question or _first_named(parts["prompt"], _QUESTIONS)
    answer = answer or _first_named(parts["answer"], _ANSWERS)
    if question is None or answer is None:
        pair = [*parts["prompt"], *parts[""], *parts["answer"]]
        # two columns alone are a question and its answer
        if len(pair) != 2 or pair == parts["answer"]:
            return
        question = question or pair[0]
        [answer] = {*pair} - {question}
    fields = {"instruction": question, "output": answer}
    fields |= {field: name for field in ("system", "reasoning") for name in parts[field][:1]}
    contexts = [name for name in parts["prompt"] if name not in fields.values()]
    if len(contexts) == 1:
        yield f"If {printable(contexts[0])} belongs to the question", {"columns": {**fields, "input": contexts[0]}}
    yield f"If {printable(answer)} is the answer to {printable(question)}", {"columns": fields}


def _unused_columns(columns: Collection[str], parser: RowParser, rows: list[Values]) -> Iterator[Suggestion]:
    required = [parser.columns.get(field, field) for field in FORMATS[parser.format].required]
    parts = _by_part(columns, rows)
    if parser.format == "text":
        yield from _questions(_by_part([*required, *columns], rows))
    elif parser.format in ("alpaca", "prompt_completion"):
        for reason, settings in _questions(parts, *required):
            if {*columns} & {*settings["columns"].values()}:
                yield reason, {"columns": parser.columns | settings["columns"]}
    elif parser.format in ("messages", "sharegpt"):
        for name in parts["system"]:
            yield f"If {printable(name)} is the system prompt", {"columns": parser.columns | {"system": name}}


def _chosen_answers(rows: list[Values], chosen: str, rejected: str) -> Iterator[Suggestion]:
    reason, ignored, values = "To train on the chosen answers", {"ignore_columns": [rejected]}, _first_values(rows)
    if isinstance(values[chosen], list):
        yield reason, {"format": "messages", "columns": {"messages": chosen}, **ignored}
    question = _first_named(_by_part(values, rows)["prompt"], _QUESTIONS)
    for column in ("conversations", "messages", question or "prompt"):
        if isinstance(values.get(column), list):
            yield reason, {"format": "prompt_completion", "columns": {"prompt": column, "completion": chosen}, **ignored}
        elif not is_blank(values.get(column)):
            yield reason, {"format": "alpaca", "columns": {"instruction": column, "output": chosen}, **ignored}
    if transcripts(rows, [chosen]):
        yield f"{reason} with their prompts, as plain text", {"format": "text", "columns": {"text": chosen}, **ignored}


def _first_named(columns: list[str], names: list[str]) -> str | None:
    columns = sorted(columns, key=len)  # `final_answer` before `answer_explanation`
    whole = {name: [name.strip().lower()] for name in columns}
    by_word = {name: re.findall(r"[a-z]+", name.lower()) for name in columns}
    return next((name for its in (whole, by_word) for wanted in names for name in columns if wanted in its[name]), None)


def _flow(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_flow(key)}: {_flow(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_flow, value))}]"
    is_plain = re.fullmatch(r"[A-Za-z_](?:[\w.-]| (?=\w))*", value, re.ASCII) and value.lower() not in _NOT_TEXT
    return value if is_plain else json.dumps(value, ensure_ascii=not value.isprintable())


_NOT_TEXT = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
