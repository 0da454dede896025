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
from finetune.data.column_semantics import CONTEXT, JUDGEMENTS, NUMBERS, REASONING, is_harmless, kinds_of, meaning_of, words_of
from finetune.data.formats import FORMATS
from finetune.data.readers import Row
from finetune.data.report import Refused, printable
from finetune.data.row_parser import PreferenceData, RowParser, UnknownColumns, choose_parser, transcript_error, transcripts
from finetune.data.sources import find_sources
from finetune.errors import DataError
from finetune.settings import DatasetRecipe
from finetune.settings.methods import METHOD_FORMATS

#: Words in the names of columns of questions, answers, reasoning and scores, usual words first.
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
_SAMPLE_ROWS = 20  # rows that are read to guess what a column is
Suggestion = tuple[str, Values]  # a reason, and settings of `dataset` by name
#: Part of an example (prompt, answer, system, reasoning, transcript, other) -> its columns; "" has columns of unknown part.
ColumnsByPart = defaultdict[str, list[str]]


def override(name: str, value: Any) -> str:
    """Return a setting of `dataset` as an argument to type."""
    return shlex.quote(f"dataset.{name}={_yaml(value)}")


def first_rows(dataset: DatasetRecipe) -> list[Row]:
    """Return the first readable rows of a dataset. Raise DataError."""
    rows = (row for source in find_sources(dataset.path, dataset) for row in source.rows() if isinstance(row, Row))
    return list(itertools.islice(rows, _SAMPLE_ROWS))


def roles_of(rows: list[Row], dataset: DatasetRecipe) -> tuple[dict[str, str], bool]:
    """Return the alpaca field of each column, or `ignore`, and whether these are guesses."""
    values = [row.values for row in rows]
    columns = list(dict.fromkeys(name for row in values for name in row))
    # nested values are conversations, which have no alpaca fields
    if any(not isinstance(value, str | int | float | None) for row in values for value in row.values()):
        return {}, False
    unclear, fields = columns, dataset.columns
    try:
        parser = choose_parser("", values, dataset)
        if parser.format != "alpaca":
            return {}, False
        unclear = [*parser.parse([*rows]).unused.blocking()]
        fields = {name: name for name in columns if name in FORMATS["alpaca"].columns} | parser.columns
        # of the unused columns only a context is guessed
        for_unused = _suggest_for_unused(unclear, parser, values)
        suggestions = [(reason, settings) for reason, settings in for_unused if "input" in settings["columns"]]
    except DataError:
        suggestions = [*_suggest_questions(_by_part(columns, values))]
    is_guess = bool(unclear) and not dataset.columns
    if is_guess:
        _, settings = _first_that_reads(suggestions, rows, "", dataset)
        fields = settings.get("columns", fields)
    field_of_column = {column: field for field, column in fields.items()}
    return {name: field_of_column.get(name, "ignore") for name in columns}, is_guess


def advice_for(error: DataError, rows: list[Row], file: str, dataset: DatasetRecipe) -> DataError:
    """Return the error, with settings that read the rows before its fix."""
    values = [row.values for row in rows]
    fixes = [error.fix]
    if isinstance(error, PreferenceData):
        if error.columns["chosen"] != "chosen":
            fixes[0] += f"  {override('columns', error.columns)}"
        fixes += _first_advice(_suggest_for_pairs(values, **error.columns), rows, file, dataset)
    elif isinstance(error, UnknownColumns) and dataset.format not in METHOD_FORMATS:
        advice = _first_advice(_suggest_for_unknown(values), rows, file, dataset)
        if not advice and (transcript_columns := transcripts(values, values[0])):
            return transcript_error(file, transcript_columns[0])
        fixes = [*advice, error.fix]
    return DataError(error.problems, "\n".join(fixes))


def advice_for_unused(blocking: Collection[str], rows: list[Row], parser: RowParser, dataset: DatasetRecipe) -> list[str]:
    """Return settings that use, or leave out, columns that stop a run."""
    leave_out = f"To leave it out:  {override('ignore_columns', [*dataset.ignore_columns, *blocking])}"
    suggestions = _suggest_for_unused(blocking, parser, [row.values for row in rows])
    return [*_first_advice(suggestions, rows, parser.file, dataset), leave_out]


def json_advice(refused: Iterable[Refused], dataset: DatasetRecipe) -> list[str]:
    """Return the setting that writes non-text values as JSON, none if all are text."""
    # `valid_text` refuses these values; items of a list have no name
    fields = [row.field for row in refused if row.field and re.fullmatch("is .*, not text", row.reason)]
    names = list(dict.fromkeys(field.rpartition(".")[2] for field in fields if not field.endswith("]")))
    return [f"To write them as JSON:  {override('json_columns', [*dataset.json_columns, *names])}"] if names else []


def _first_advice(suggestions: Iterable[Suggestion], rows: list[Row], file: str, dataset: DatasetRecipe) -> list[str]:
    reason, settings = _first_that_reads(suggestions, rows, file, dataset)
    return [f"{reason}:  {'  '.join(override(name, value) for name, value in settings.items())}"] if settings else []


def _first_that_reads(suggestions: Iterable[Suggestion], rows: list[Row], file: str, dataset: DatasetRecipe) -> Suggestion:
    for reason, settings in suggestions:
        if completed := _completed(settings, rows, file, dataset):
            return reason, completed
    return "", {}


def _completed(settings: Values, rows: list[Row], file: str, dataset: DatasetRecipe) -> Values:
    # the settings, extended until they read most rows; empty if they can't
    columns = settings["columns"]
    # columns with a field's name that would not be read, because the settings read the field from another column
    hidden = ({"system", "input", "reasoning"} & {*columns}) - {*columns.values(), *dataset.columns}
    if any(not is_blank(row.values.get(name)) for row in rows for name in hidden):
        return {}
    answer_columns = [column for field, column in columns.items() if field in ("output", "completion")]
    for json_columns in ([], answer_columns):
        candidate = {**settings, "json_columns": json_columns} if json_columns else dict(settings)
        if dataset.format != "auto":
            candidate.setdefault("format", "auto")
        for _ in range(3):  # other columns may be unused after a column is left out
            try:
                parser = choose_parser(file, [row.values for row in rows], dataset.model_copy(update=candidate))
                batch = replace(parser, reads_pictures=False).parse(list(rows))
            except DataError:
                return {}
            blocking = batch.unused.blocking()
            if not blocking:
                break
            candidate["ignore_columns"] = [*candidate.get("ignore_columns", dataset.ignore_columns), *blocking]
        if not blocking and 2 * len(batch.examples) >= len(rows):
            return candidate
    return {}


def _suggest_for_unknown(rows: list[Values]) -> Iterator[Suggestion]:
    first_values = _first_values(rows)
    for name, value in first_values.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            field = "conversations" if "from" in value[0] else "messages"
            yield "Perhaps", {"columns": {field: name}}
    parts = _by_part(first_values, rows)
    yield from _suggest_questions(parts)
    texts = [name for part, names in parts.items() if part != "other" for name in names]
    if len(texts) == 1 and not transcripts(rows, texts):
        yield f"To train on {printable(texts[0])} as plain text", {"format": "text", "columns": {"text": texts[0]}}


def _first_values(rows: list[Values]) -> Values:
    # in reverse, so that values of earlier rows replace later ones
    return {name: value for row in reversed(rows) for name, value in row.items() if not is_missing(value)}


def _by_part(columns: Iterable[str], rows: list[Values]) -> ColumnsByPart:
    parts = ColumnsByPart(list)
    for name in columns:
        parts[_example_part(name, rows)].append(name)
    return parts


def _example_part(name: str, rows: list[Values]) -> str:
    values = [row[name] for row in rows[:_SAMPLE_ROWS] if not is_missing(row.get(name))]
    kinds = set[str]().union(*(kinds_of(name, value) for value in values))
    # words_of splits AnswerId; the pattern finds words with other letters than a to z
    name_words, meaning = {*words_of(name), *re.findall(r"[^\W\d_]+", name.lower())}, meaning_of(name)
    is_answer = bool(name_words & {*_ANSWERS}) and not name_words & {"options", "choices"}
    is_text = any(isinstance(value, str) for value in values) and bool(kinds - NUMBERS - {"truth"})
    # with has_answer=False, a label or a date may be what the model learns
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
    if kinds == {"token"} and len({*map(str, values)}) == len(values) > 2:  # ids of rows, such as T-1, T-2, T-3
        return "other"
    return "transcript" if transcripts(rows, [name]) else ""


def _suggest_questions(parts: ColumnsByPart, question: str | None = None, answer: str | None = None) -> Iterator[Suggestion]:
    question = question or _first_named(parts["prompt"], _QUESTIONS)
    answer = answer or _first_named(parts["answer"], _ANSWERS)
    if question is None or answer is None:
        pair = [*parts["prompt"], *parts[""], *parts["answer"]]
        if len(pair) != 2 or pair == parts["answer"]:  # two columns alone are a question and its answer
            return
        question = question or pair[0]
        answer = pair[1] if question == pair[0] else pair[0]
    fields = {"instruction": question, "output": answer}
    fields |= {field: name for field in ("system", "reasoning") for name in parts[field][:1]}
    contexts = [name for name in parts["prompt"] if name not in fields.values()]
    if len(contexts) == 1:
        yield f"If {printable(contexts[0])} belongs to the question", {"columns": {**fields, "input": contexts[0]}}
    yield f"If {printable(answer)} is the answer to {printable(question)}", {"columns": fields}


def _suggest_for_unused(columns: Collection[str], parser: RowParser, rows: list[Values]) -> Iterator[Suggestion]:
    required = [parser.columns.get(field, field) for field in FORMATS[parser.format].required]
    parts = _by_part(columns, rows)
    if parser.format == "text":
        yield from _suggest_questions(_by_part([*required, *columns], rows))
    elif parser.format in ("alpaca", "prompt_completion"):
        for reason, settings in _suggest_questions(parts, *required):
            if {*columns} & {*settings["columns"].values()}:
                yield reason, {"columns": parser.columns | settings["columns"]}
    elif parser.format in ("messages", "sharegpt"):
        for name in parts["system"]:
            yield f"If {printable(name)} is the system prompt", {"columns": parser.columns | {"system": name}}


def _suggest_for_pairs(rows: list[Values], chosen: str, rejected: str) -> Iterator[Suggestion]:
    reason, ignored = "To train on the chosen answers", {"ignore_columns": [rejected]}
    first_values = _first_values(rows)
    if isinstance(first_values[chosen], list):
        yield reason, {"format": "messages", "columns": {"messages": chosen}, **ignored}
    question = _first_named(_by_part(first_values, rows)["prompt"], _QUESTIONS)
    for column in ("conversations", "messages", question or "prompt"):
        if isinstance(first_values.get(column), list):
            yield reason, {"format": "prompt_completion", "columns": {"prompt": column, "completion": chosen}, **ignored}
        elif not is_blank(first_values.get(column)):
            yield reason, {"format": "alpaca", "columns": {"instruction": column, "output": chosen}, **ignored}
    if transcripts(rows, [chosen]):
        yield f"{reason} with their prompts, as plain text", {"format": "text", "columns": {"text": chosen}, **ignored}


def _first_named(columns: list[str], names: list[str]) -> str | None:
    columns = sorted(columns, key=len)  # `final_answer` before `answer_explanation`
    whole_names = {column: [column.strip().lower()] for column in columns}
    name_words = {column: re.findall(r"[a-z]+", column.lower()) for column in columns}
    # equal names come before names that contain the word
    matches = (column for terms in (whole_names, name_words) for name in names for column in columns if name in terms[column])
    return next(matches, None)


def _yaml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_yaml(key)}: {_yaml(item)}' for key, item in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_yaml, value))}]"
    needs_no_quotes = re.fullmatch(r"[A-Za-z_](?:[\w.-]| (?=\w))*", value, re.ASCII) and value.lower() not in _YAML_WORDS
    return value if needs_no_quotes else json.dumps(value, ensure_ascii=not value.isprintable())


#: YAML reads these words as true, false or null, or did in version 1.1.
_YAML_WORDS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
