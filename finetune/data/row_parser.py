"""Turn a source's rows into examples, in a way chosen from its first rows, as is the method."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shlex
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.data.checks import TOKENISED, BadRow, Values, is_blank, is_missing, parse_if_text, valid_json
from finetune.data.column_semantics import COLUMNS, FIELDS, REASONING, UnusedColumns, check_placeholders, kinds_of, meaning_of
from finetune.data.conversation import Columns, Example, MessageReader
from finetune.data.formats import FORMATS, LABELLED_ANSWERS, column_list, filled, parse
from finetune.data.pictures.placement import PictureReference, PictureUse, picture_use, place_pictures, take_pictures
from finetune.data.pictures.source import FileStat, PictureReader
from finetune.data.readers import Row
from finetune.data.report import Refused, printable
from finetune.data.sources import is_local, sources_of
from finetune.errors import DataError
from finetune.settings import DatasetRecipe
from finetune.settings.methods import METHOD_FORMATS, METHODS

#: Values of a label that marks an answer good or bad; others are classes.
_MARKS = (True, False, "true", "false", "True", "False")


@dataclass(frozen=True)
class ParsedBatch:
    """Rows of one batch."""

    examples: list[Example]
    refused: list[Refused]
    unused: UnusedColumns
    picture_files: dict[str, FileStat]


@dataclass(frozen=True)
class RowParser:
    """The format of a source's rows, and their column names."""

    file: str
    format: str
    #: `preference` where pairs are read as two labelled answers each, else `format`.
    row_format: str
    columns: Columns
    dataset: DatasetRecipe
    #: Unused columns of the first rows.
    unused_columns: tuple[str, ...]
    pictures: PictureUse
    #: Folder of the data file.
    folder: str | None
    #: If false, no image is opened, and examples have no images.
    reads_pictures: bool = True

    def parse(self, batch: list[Row | Refused]) -> ParsedBatch:
        parsed: list[tuple[Example, list[PictureReference]]] = []
        refused: list[Refused] = []
        unused = UnusedColumns(self.file, self.format)
        for row in batch:
            if isinstance(row, Refused):
                refused.append(row)
                continue
            try:
                example, references = self._parse_row(row, unused)
                if self.row_format != self.format:  # a good and a bad answer, as TRL reads pairs for KTO
                    chosen, rejected = example.pair()
                    parsed += [(replace(chosen, desirable=True), references), (replace(rejected, desirable=False), references)]
                else:
                    parsed.append((example, references))
            except BadRow as error:
                refused.append(Refused(row.file, row.number, self.columns.get(error.field or "", error.field), error.reason))
        if not self.reads_pictures or not any(references for _, references in parsed):
            return ParsedBatch([example for example, _ in parsed], refused, unused, {})
        reader, examples = PictureReader(self.folder, self.dataset.image_folder), list[Example]()
        for (example, references), pictures in zip(parsed, reader.read([row[1] for row in parsed]), strict=True):
            if isinstance(pictures, BadRow):
                name = (pictures.field or "").partition("[")[0]
                field_name = (pictures.field or "").replace(name, self.columns.get(name, name), 1)
                refused.append(Refused(example.file, example.row, field_name, pictures.reason))
            else:
                examples.append(replace(example, pictures=pictures) if references else example)
        return ParsedBatch(examples, refused, unused, reader.files)

    def _parse_row(self, row: Row, unused: UnusedColumns) -> tuple[Example, list[PictureReference]]:
        values = _apply_columns(row.values, self.dataset.ignore_columns, self.dataset.json_columns)
        renamed, row_pictures = take_pictures(_rename_columns(values, self.columns), self.pictures.columns)
        unread = {name: value for name, value in renamed.items() if name not in FORMATS[self.row_format].columns}
        # columns named like a field that the recipe maps to another column
        unread |= {name: values[name] for name in self.columns if name in values and name not in self.columns.values()}
        reader = MessageReader(self.columns)
        example = parse(renamed, self.row_format, row.file, row.number, reader)
        references: list[PictureReference] = []
        if row_pictures is not None or self.pictures.are_usual or any("pictures" in message for message in example.messages):
            example, references = place_pictures(example, row_pictures, self.pictures)
        unused.add(COLUMNS, unread, row.number, _read_texts(renamed, self.row_format, example) if unread else [])
        for fields in reader.unread:
            unused.add(FIELDS, fields, row.number)
        check_placeholders(row.values, example.texts())
        return example, references


def choose_parser(file: str, rows: list[Values], dataset: DatasetRecipe, folder: Path | None = None) -> RowParser:
    """Choose the parser for rows like these. Raise DataError, or UnknownColumns if settings may help."""
    columns = dataset.columns
    # the recipe names the reasoning column, and leaves out reasoning
    if "reasoning_content" in dataset.ignore_columns and "reasoning" in columns:
        columns = {**columns}
        dataset = dataset.model_copy(update={"ignore_columns": [*dataset.ignore_columns, columns.pop("reasoning")]})
    ignored = dataset.ignore_columns
    if dataset.format not in METHOD_FORMATS:
        _check_other_data(rows, file, {*columns.values(), *ignored})
    header = {name for values in rows for name in values}
    rows = [_apply_columns(values, ignored) for values in rows]
    if dataset.format == "labelled" and "label" not in (*columns, *header) and "kto_tag" in header:
        # LLaMA-Factory's name
        columns = {**columns, "label": "kto_tag"}
    names = {*columns, *header}
    unpairs = dataset.format == "labelled" and "label" not in names and names.issuperset(FORMATS["preference"].required)
    _check_columns(rows, file, "preference" if unpairs else dataset.format, columns)
    if not columns and dataset.format == "auto":
        columns = _usual_columns(rows)
    renamed_rows = [_rename_columns(values, columns) for values in rows]
    format_name = _detect(renamed_rows, file) if dataset.format == "auto" else dataset.format
    row_format = "preference" if unpairs else format_name
    if dataset.format not in METHOD_FORMATS:
        columns = columns | _reasoning_column(renamed_rows, file, format_name, columns)
        renamed_rows = [_rename_columns(values, columns) for values in rows]
    pictures = picture_use(file, renamed_rows)
    read = {*FORMATS[row_format].columns, *pictures.columns}
    column_names = [*(column for values in renamed_rows for column in values), *(name for name in ignored if name in header)]
    unused = tuple(dict.fromkeys(printable(name) for name in column_names if name not in read))
    return RowParser(file, format_name, row_format, columns, dataset, unused, pictures, None if folder is None else str(folder))


_FORMAT_FIELDS = sorted({"role", "content", "images"}.union(*(fmt.columns for fmt in FORMATS.values())))
#: Columns of a question and its answer under other names, read as alpaca.
_QUESTIONS_ANSWERS = [
    names.split()
    for names in (
        "instruction response context", "instruction response", "question answer", "question response", "query response",
        "query answer", "prompt response", "prompt answer",
    )
]  # fmt: skip


class UnknownColumns(DataError):
    """Columns of no format, or not the recipe's."""


def _formats_with(columns: set[str]) -> list[str]:
    return [name for name, fmt in FORMATS.items() if name != "labelled" and columns.issuperset(fmt.required)]


def _usual_columns(rows: list[Values]) -> Columns:
    """Map usual names of question and answer to alpaca's; empty for others."""
    filled_columns = filled(rows)
    if _formats_with(filled_columns):
        return {}
    names = next((names for names in _QUESTIONS_ANSWERS if filled_columns.issuperset(names)), ())
    return dict(zip(("instruction", "output", "input"), names, strict=False))


def _reasoning_column(rows: list[Values], file: str, format_name: str, columns: Columns) -> Columns:
    """Map a reasoning column by its usual names. Raise DataError for unusable reasoning."""
    answers = [name for name in ("output", "completion", "messages", "conversations") if name in FORMATS[format_name].columns]
    for name in transcripts(rows, answers):
        raise transcript_error(file, columns.get(name, name))
    named = [name for name in filled(rows) if meaning_of(name) == REASONING]
    if format_name != "alpaca":
        if "reasoning" in columns:
            raise DataError(
                f"{file}: is read as {format_name}, which has no field reasoning",
                "Map the question and answer columns to instruction and output; in messages use reasoning_content.",
            )
        return {}
    texts = [
        name for name in named
        if any(isinstance(row.get(name), str) and kinds_of(name, row[name]) & {"text", "label"} for row in rows)
    ]  # fmt: skip
    if "reasoning" in named and "reasoning" not in texts:
        raise DataError(
            f"{file}: '{columns.get('reasoning', 'reasoning')}' has no texts, so it isn't the reasoning before the answers",
            "To leave it out:  dataset.ignore_columns=[reasoning_content]",
        )
    return {"reasoning": texts[0]} if len(texts) == 1 and "reasoning" not in named else {}


def _rename_columns(row: Values, columns: Columns) -> Values:
    """Rename the user's columns (field -> column) to the format's."""
    mapped = {field: row[column] for field, column in columns.items() if column in row}
    return {name: value for name, value in row.items() if name not in columns.values()} | mapped


def _detect(rows: list[Values], file: str) -> str:
    """Return the format of most rows. Raise UnknownColumns for none, DataError for several."""
    counts: Counter[str] = Counter()
    for row in rows:
        matching = _formats_with(filled([row]))
        # many published datasets have a copy of the other columns in `text`
        matching = matching if len(matching) == 1 else [name for name in matching if name != "text"]
        if len(matching) > 1:
            names = " and ".join(matching)
            raise DataError(
                f"{file}: the columns ({column_list(rows)}) fit more than one format: {names}",
                f"Choose one, for example  dataset.format={matching[0]}",
            )
        counts.update(matching)
    if not counts:
        counts.update(_formats_with({name for row in rows for name in row}))
    if not counts:
        raise UnknownColumns(f"{file}: no known format has these columns: {column_list(rows)}", _FORMATS_HINT)
    return counts.most_common(1)[0][0]


def _check_columns(rows: list[Values], file: str, format_name: str, columns: Columns) -> None:
    """Raise DataError for required or mapped columns that no row has; `rows` are not renamed."""
    header = {key for row in rows for key in row}
    for field, column in columns.items():
        if field not in _FORMAT_FIELDS:
            raise DataError(
                f"dataset.columns: '{printable(field)}' is not a field of any format",
                f"The fields are {', '.join(_FORMAT_FIELDS)}.",
            )
        if column not in header and field not in ("role", "content"):
            raise DataError(
                f"{file}: dataset.columns maps {field} to a column '{printable(column)}', and the file has {column_list(rows)}",
                "Use a column name of the file.",
            )
    required = FORMATS[format_name].required if format_name in FORMATS else ()
    missing = [column for column in required if column not in {*header, *columns}]
    if missing:
        raise UnknownColumns(
            f"{file}: format {format_name} needs the column(s) {', '.join(missing)}; the file has {column_list(rows)}",
            _FORMATS_HINT,
        )


#: Fields that every message needs: they stay if a column of the same name is left out.
_MESSAGE_PARTS = {"role", "content", "from", "value"}


def _apply_columns(row: Values, ignored: Collection[str], as_json: Collection[str] = (), *, in_message: bool = False) -> Values:
    """Drop ignored columns and message fields, and write values that aren't text as JSON. Raise BadRow."""
    # `reasoning_content` means reasoning under any name
    if "reasoning_content" in ignored:
        ignored = {*ignored, "reasoning", "thinking", *(name for name in row if meaning_of(name) == REASONING)}
    if not ignored and not as_json:
        return row
    applied = {name: value for name, value in row.items() if name not in ignored}
    for name, value in applied.items():
        if name in as_json:
            if not isinstance(value, str) and not is_missing(value):
                applied[name] = json.dumps(valid_json(value, name), ensure_ascii=False)
            continue
        if isinstance(value, str) and value.lstrip().startswith("[") and any(field in value for field in ignored):
            with contextlib.suppress(BadRow):  # it is plain text
                value = parse_if_text(value, name)
        if isinstance(value, list):
            # parts of a message's content keep their fields
            dropped = set() if in_message else {*ignored} - _MESSAGE_PARTS
            applied[name] = [
                _apply_columns(item, dropped, as_json, in_message=True) if isinstance(item, dict) else item for item in value
            ]
    return applied


class PreferenceData(DataError):
    """Rows with a better and a worse answer."""

    def __init__(self, file: str, chosen: str, rejected: str) -> None:
        super().__init__(
            f"{file}: this is preference data ({chosen}/{rejected}) for DPO; method sft trains on one answer per prompt",
            "To learn to prefer the chosen answers:  method=dpo",
        )
        self.columns = {"chosen": chosen, "rejected": rejected}


def _check_other_data(rows: list[Values], file: str, mapped_columns: Iterable[str]) -> None:
    filled_columns = {name for row in rows for name, value in row.items() if not is_blank(value)} - set(mapped_columns)
    for columns, (problem, fix) in _NOT_TRAINING_DATA.items():
        if filled_columns.issuperset(columns):
            raise DataError(f"{file}: {problem}", fix.replace("FILE", shlex.quote(file)))
    for chosen, rejected in (("chosen", "rejected"), ("chosen_response", "rejected_response"), ("response_j", "response_k")):
        if filled_columns.issuperset((chosen, rejected)):
            raise PreferenceData(file, chosen, rejected)


#: Where somebody begins to speak in a text: USER:, ### Human:, **User**:, <|im_start|>user, [INST].
_TURN = r"(?:^|[\s>])(?:[#*\[(<]* ?(?:{0})[*\])>]*:|<[|｜](?:\w+\|>)?(?:{0})\b|{1})"
_USER = _TURN.format("user|human", r"\[INST\]|<start_of_turn>user")
_ASSISTANT = _TURN.format("assistant|gpt|chatgpt|chatbot|bot|ai", r"\[/INST\]|<start_of_turn>model")
_TRANSCRIPT = re.compile(f"(?>.*?{_USER}).*{_ASSISTANT}", re.I | re.S)  # atomic: one search for each, in any text
_SAMPLE_ROWS, _SAMPLE_CHARACTERS = 50, 4_000


def transcripts(rows: list[Values], columns: Iterable[str]) -> list[str]:
    """Return the columns whose texts are mostly whole conversations."""
    texts = {name: [row[name] for row in rows[:_SAMPLE_ROWS] if isinstance(row.get(name), str)] for name in columns}
    conversations = {name: [text for text in texts[name] if _TRANSCRIPT.match(text[:_SAMPLE_CHARACTERS])] for name in texts}
    return [name for name in texts if 2 * len(conversations[name]) > len(texts[name])]


def transcript_error(file: str, column: str) -> DataError:
    """Return the error for a column of whole conversations."""
    return DataError(
        f"{file}: '{printable(column)}' is a transcript: a conversation in one text (USER: ... ASSISTANT: ...), "
        "so the user's turns would be trained on, too",
        'Write its turns as messages: [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]',
    )


_NOT_TRAINING_DATA: dict[tuple[str, ...], tuple[str, str]] = {
    ("turns", "category"): (
        "these are evaluation questions (MT-Bench: turns, category) without answers to train on",
        "Set dataset.path to a file with answers.",
    ),
    ("instruction", "instances"): (
        "these are seed tasks (self-instruct: instruction, instances); the answers are inside instances",
        "Make a row for each:  jq -c '.instruction as $i | .instances[] | {instruction: $i, input, output}' FILE > rows.jsonl",
    ),
    ("input_ids",): TOKENISED,
}


def _read_texts(row: Values, format_name: str, example: Example) -> list[str]:
    if example.messages and format_name != "alpaca":
        texts = [message["content"] for message in example.messages if message["role"] not in ("system", "developer")]
    else:
        texts = [row[name] for name in (*FORMATS[format_name].required, "input") if isinstance(row.get(name), str)]
    return [text.strip() for text in texts if text.strip()]


def method_of_rows(dataset: DatasetRecipe) -> tuple[str, str]:
    """Choose the training method by the first rows, with the reason. Raise DataError or RecipeError."""
    for name, method in METHODS.items():
        if method.has_own_format and dataset.format == method.row_format:
            return name, f"dataset.format is {dataset.format}"
    paths = [dataset.path] if isinstance(dataset.path, str) else dataset.path
    if not all(map(is_local, paths)):
        return "sft", "the rows are not on this machine"
    rows = [row.values for row in itertools.islice(sources_of(dataset)[0][0].rows(), 100) if isinstance(row, Row)]
    renamed = [_rename_columns(values, dataset.columns) for values in rows]
    filled_columns = filled(renamed)
    if filled_columns.issuperset(FORMATS["preference"].required):
        return "dpo", "the rows have a chosen and a rejected answer"
    has_answers = any(filled_columns.issuperset(FORMATS[name].required) for name in LABELLED_ANSWERS)
    for column in ("label", "kto_tag") if has_answers else ():
        if column in filled_columns and all(values.get(column) in _MARKS for values in renamed):
            return "kto", f"the answers are marked good or bad ({column})"
    return "sft", "the rows have one answer each"


_FORMATS_HINT = "\n".join([
    "Write rows like one of these, or map your columns with dataset.columns (field: your column):",
    *(f"  {name}: {fmt.example_line}" for name, fmt in FORMATS.items()),
])  # fmt: skip
