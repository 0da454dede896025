"""Turn a source's rows into examples, in a way chosen from its first rows, as is the method."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.data.checks import BadRow, Values
from finetune.data.column_semantics import COLUMNS, FIELDS, UnusedColumns, apply_columns, check_other_data, check_placeholders
from finetune.data.conversation import Columns, Example, MessageReader
from finetune.data.formats import (
    FORMATS,
    LABELLED_ANSWERS,
    check_columns,
    detect,
    filled,
    parse,
    reasoning_column,
    rename_columns,
    usual_columns,
)
from finetune.data.pictures.placement import (
    PictureReference,
    picture_columns,
    place_pictures,
    rows_have_pictures,
    rows_have_tags,
    take_pictures,
)
from finetune.data.pictures.source import FileStat, PictureReader
from finetune.data.readers import Row
from finetune.data.report import Refused, printable
from finetune.data.sources import is_local, sources_of
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
    picture_columns: tuple[str, ...]
    #: Some of the first rows have an image.
    has_pictures: bool
    #: Most of the first rows have `<image>`.
    has_tags: bool
    #: Folder of the data file.
    folder: str | None
    #: If false, no image is opened, and examples have no images.
    reads_pictures: bool = True

    def parse(self, batch: list[Row | Refused]) -> ParsedBatch:
        examples: list[Example] = []
        refused: list[Refused] = []
        unused = UnusedColumns(self.file, self.format)
        pictures: dict[int, list[PictureReference]] = {}  # by the index of the example
        for row in batch:
            if isinstance(row, Refused):
                refused.append(row)
                continue
            try:
                example, references = self._parse_row(row, unused)
                if references:
                    pictures[len(examples)] = references
                if self.row_format != self.format:  # a good and a bad answer, as TRL reads pairs for KTO
                    chosen, rejected = example.pair()
                    examples += [replace(chosen, desirable=True), replace(rejected, desirable=False)]
                else:
                    examples.append(example)
            except BadRow as error:
                refused.append(Refused(row.file, row.number, self.columns.get(error.field or "", error.field), error.reason))
        files = self._open_pictures(examples, pictures, refused) if pictures and self.reads_pictures else {}
        return ParsedBatch(examples, refused, unused, files)

    def _open_pictures(
        self, examples: list[Example], pictures: dict[int, list[PictureReference]], refused: list[Refused]
    ) -> dict[str, FileStat]:
        """Set the images of `examples`, refuse rows with bad images, and return the checked files."""
        reader = PictureReader(self.folder, self.dataset.image_folder)
        bad_rows = set()
        for index, sources in zip(pictures, reader.read(pictures.values()), strict=True):
            example = examples[index]
            if isinstance(sources, BadRow):
                bad_rows.add(index)
                name = (sources.field or "").partition("[")[0]
                field_name = (sources.field or "").replace(name, self.columns.get(name, name), 1)
                refused.append(Refused(example.file, example.row, field_name, sources.reason))
            else:
                examples[index] = replace(example, pictures=sources)
        examples[:] = [example for index, example in enumerate(examples) if index not in bad_rows]
        return reader.files

    def _parse_row(self, row: Row, unused: UnusedColumns) -> tuple[Example, list[PictureReference]]:
        values = apply_columns(row.values, self.dataset.ignore_columns, self.dataset.json_columns)
        renamed, row_pictures = take_pictures(rename_columns(values, self.columns), self.picture_columns)
        unread = {name: value for name, value in renamed.items() if name not in FORMATS[self.row_format].columns}
        # columns named like a field that the recipe maps to another column
        unread |= {name: values[name] for name in self.columns if name in values and name not in self.columns.values()}
        reader = MessageReader(self.columns)
        example = parse(renamed, self.row_format, row.file, row.number, reader)
        references: list[PictureReference] = []
        if row_pictures is not None or self.has_pictures or any("pictures" in message for message in example.messages):
            example, references = place_pictures(
                example, row_pictures, expects_pictures=self.has_pictures, expects_tags=self.has_tags
            )
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
        check_other_data(rows, file, {*columns.values(), *ignored})
    header = {name for values in rows for name in values}
    rows = [apply_columns(values, ignored) for values in rows]
    if dataset.format == "labelled" and "label" not in (*columns, *header) and "kto_tag" in header:
        # LLaMA-Factory's name
        columns = {**columns, "label": "kto_tag"}
    names = {*columns, *header}
    unpairs = dataset.format == "labelled" and "label" not in names and names.issuperset(FORMATS["preference"].required)
    check_columns(rows, file, "preference" if unpairs else dataset.format, columns)
    if not columns and dataset.format == "auto":
        columns = usual_columns(rows)
    renamed_rows = [rename_columns(values, columns) for values in rows]
    format_name = detect(renamed_rows, file) if dataset.format == "auto" else dataset.format
    row_format = "preference" if unpairs else format_name
    if dataset.format not in METHOD_FORMATS:
        columns = columns | reasoning_column(renamed_rows, file, format_name, columns)
        renamed_rows = [rename_columns(values, columns) for values in rows]
    images = picture_columns(file)
    read = {*FORMATS[row_format].columns, *images}
    column_names = [*(column for values in renamed_rows for column in values), *(name for name in ignored if name in header)]
    unused = tuple(dict.fromkeys(printable(name) for name in column_names if name not in read))
    has_pictures = rows_have_pictures(renamed_rows, images)
    has_tags = has_pictures and rows_have_tags(renamed_rows)
    data_folder = None if folder is None else str(folder)
    return RowParser(file, format_name, row_format, columns, dataset, unused, images, has_pictures, has_tags, data_folder)


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
    renamed = [rename_columns(values, dataset.columns) for values in rows]
    filled_columns = filled(renamed)
    if filled_columns.issuperset(FORMATS["preference"].required):
        return "dpo", "the rows have a chosen and a rejected answer"
    has_answers = any(filled_columns.issuperset(FORMATS[name].required) for name in LABELLED_ANSWERS)
    for column in ("label", "kto_tag") if has_answers else ():
        if column in filled_columns and all(values.get(column) in _MARKS for values in renamed):
            return "kto", f"the answers are marked good or bad ({column})"
    return "sft", "the rows have one answer each"
