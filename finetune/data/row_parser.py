"""Choose the format and the training method from a source's first rows, and parse its rows into examples."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from finetune.data.checks import BadRow, Values, is_blank, is_missing
from finetune.data.column_semantics import FIELD, REASONING, UnusedColumns, check_media_tags, kinds_of, meaning_of, words_of
from finetune.data.conversation import Columns, Example, MessageReader, used_fields
from finetune.data.formats import FORMATS, LABELLED_ANSWERS, column_list, columns_with_values, parse
from finetune.data.pictures.placement import PictureReference, PictureUse, picture_use, place_pictures, take_pictures
from finetune.data.pictures.source import FileStat, PictureReader
from finetune.data.readers import Row
from finetune.data.report import Refused, override, printable
from finetune.data.sources import is_local, sources_of
from finetune.errors import DataError
from finetune.settings import DatasetRecipe
from finetune.settings.methods import METHOD_FORMATS, METHODS


@dataclass(frozen=True)
class ParsedBatch:
    """Rows of one batch."""

    examples: list[Example]
    refused: list[Refused]
    unused: UnusedColumns
    picture_files: dict[str, FileStat]  # path of each image file -> its stat


@dataclass(frozen=True)
class RowParser:
    """The format of a source's rows, and their column names."""

    file: str
    format: str
    row_format: str  # `preference` if a pair becomes two labelled examples, else `format`
    columns: Columns
    dataset: DatasetRecipe
    unused_columns: tuple[str, ...]  # unused columns of the first rows
    pictures: PictureUse
    folder: Path | None  # folder of the data file

    def parse(self, batch: list[Row | Refused]) -> ParsedBatch:
        """Parse rows; a row that can't be trained on is refused with a reason."""
        examples: list[tuple[Example, list[PictureReference]]] = []
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
                    examples.append((replace(chosen, desirable=True), references))
                    examples.append((replace(rejected, desirable=False), references))
                else:
                    examples.append((example, references))
            except BadRow as error:
                refused.append(Refused(row.file, row.number, self.columns.get(error.field or "", error.field), error.reason))
        if not any(references for _, references in examples):
            return ParsedBatch([example for example, _ in examples], refused, unused, {})
        reader, with_pictures = PictureReader(self.folder, self.dataset.image_folder), list[Example]()
        for example, references in examples:
            try:
                pictures = tuple(map(reader.read, references))
            except BadRow as error:
                field, bracket, position = (error.field or "").partition("[")
                column = self.columns.get(field, field) + bracket + position
                refused.append(Refused(example.file, example.row, column, error.reason))
            else:
                with_pictures.append(replace(example, pictures=pictures) if references else example)
        return ParsedBatch(with_pictures, refused, unused, reader.files)

    def _parse_row(self, row: Row, unused: UnusedColumns) -> tuple[Example, list[PictureReference]]:
        ignored, as_json = self.dataset.ignore_columns, self.dataset.json_columns
        values = used_fields(row.values, ignored, as_json)
        renamed, row_pictures = take_pictures(_rename_columns(values, self.columns), self.pictures.columns)
        unread = {name: value for name, value in renamed.items() if name not in FORMATS[self.row_format].columns}
        # columns with the name of a field that the recipe maps to another column
        unread |= {name: values[name] for name in self.columns if name in values and name not in self.columns.values()}
        reader = MessageReader(self.columns, ignored, as_json)
        example = parse(renamed, self.row_format, row.file, row.number, reader)
        references: list[PictureReference] = []
        if row_pictures is not None or self.pictures.are_usual or any("pictures" in message for message in example.messages):
            example, references = place_pictures(example, row_pictures, self.pictures)
        unused.add("", unread, _read_texts(renamed, self.row_format, example) if unread else [])
        for fields in reader.unread:
            unused.add(FIELD, fields)
        check_media_tags(row.values, example.texts())
        return example, references


def choose_parser(file: str, rows: list[Values], dataset: DatasetRecipe, folder: Path | None = None) -> RowParser:
    """Choose the parser for rows like these. Raise DataError."""
    columns = dataset.columns
    # the recipe maps a column to reasoning, and ignores reasoning: that column is ignored
    if "reasoning_content" in dataset.ignore_columns and "reasoning" in columns:
        columns = {**columns}
        dataset = dataset.model_copy(update={"ignore_columns": [*dataset.ignore_columns, columns.pop("reasoning")]})
    ignored = dataset.ignore_columns
    if dataset.format not in METHOD_FORMATS:
        _refuse_other_data(rows, file, {*columns.values(), *ignored})
    header = {name for values in rows for name in values}
    rows = [used_fields(values, ignored) for values in rows]
    if dataset.format == "labelled" and "label" not in (*columns, *header) and "kto_tag" in header:
        columns = {**columns, "label": "kto_tag"}  # LLaMA-Factory's name
    names = {*columns, *header}
    splits_pairs = dataset.format == "labelled" and "label" not in names and names.issuperset(FORMATS["preference"].required)
    _check_columns(rows, file, "preference" if splits_pairs else dataset.format, columns)
    if not columns and dataset.format == "auto" and not _formats_with(filled_columns := columns_with_values(rows)):
        usual_names = next((usual for usual in _ALPACA_NAMES if filled_columns.issuperset(usual)), ())
        columns = dict(zip(("instruction", "output", "input"), usual_names, strict=False))
    renamed_rows = [_rename_columns(values, columns) for values in rows]
    format_name = _most_common_format(renamed_rows, file, columns) if dataset.format == "auto" else dataset.format
    row_format = "preference" if splits_pairs else format_name
    if dataset.format not in METHOD_FORMATS:
        columns = columns | _reasoning_column(renamed_rows, file, format_name, columns)
        renamed_rows = [_rename_columns(values, columns) for values in rows]
    pictures = picture_use(file, renamed_rows)
    used_columns = {*FORMATS[row_format].columns, *pictures.columns}
    names_in_order = itertools.chain(*renamed_rows, (name for name in ignored if name in header))
    unused = tuple(dict.fromkeys(printable(name) for name in names_in_order if name not in used_columns))
    return RowParser(file, format_name, row_format, columns, dataset, unused, pictures, folder)


#: Fields that dataset.columns can map.
_FORMAT_FIELDS = sorted({"role", "content", "images"}.union(*(fmt.columns for fmt in FORMATS.values())))
#: Usual names of the columns instruction, output and input.
_ALPACA_NAMES = [
    names.split()
    for names in (
        "instruction response context", "instruction response", "question answer", "question response", "query response",
        "query answer", "prompt response", "prompt answer",
    )
]  # fmt: skip


def _formats_with(columns: set[str]) -> list[str]:
    return [name for name, fmt in FORMATS.items() if name != "labelled" and columns.issuperset(fmt.required)]


def _reasoning_column(rows: list[Values], file: str, format_name: str, columns: Columns) -> Columns:
    # maps `reasoning` to the only column with a usual name for it; DataError for transcripts and unusable reasoning
    answers = [name for name in ("output", "completion", "messages", "conversations") if name in FORMATS[format_name].columns]
    _refuse_transcripts(rows, file, answers, columns)
    if format_name != "alpaca":
        if "reasoning" in columns:
            problem = f"{file}: is read as {format_name}, which has no field reasoning"
            fix = "Map the question and answer columns to instruction and output; in messages use reasoning_content."
            raise DataError(problem, fix)
        return {}
    named_columns = [name for name in columns_with_values(rows) if meaning_of(name) == REASONING]
    text_columns = [
        name for name in named_columns
        if any(isinstance(row.get(name), str) and kinds_of(name, row[name]) & {"text", "label"} for row in rows)
    ]  # fmt: skip
    if "reasoning" not in named_columns:
        return {"reasoning": text_columns[0]} if len(text_columns) == 1 else {}
    if "reasoning" not in text_columns:
        name = columns.get("reasoning", "reasoning")
        problem = f"{file}: '{name}' has no texts, so it isn't the reasoning before the answers"
        raise DataError(problem, "To leave it out:  dataset.ignore_columns=[reasoning_content]")
    return {}


def _rename_columns(row: Values, columns: Columns) -> Values:
    # `columns` maps fields of the format to columns of the row
    mapped = {field: row[column] for field, column in columns.items() if column in row}
    return {name: value for name, value in row.items() if name not in columns.values()} | mapped


def _most_common_format(rows: list[Values], file: str, columns: Columns) -> str:
    counts: Counter[str] = Counter()
    for row in rows:
        matching = _formats_with(columns_with_values([row]))
        # many published datasets have a copy of the other columns in `text`
        if len(matching) > 1 and "text" in matching:
            matching.remove("text")
        if len(matching) > 1:
            problem = f"{file}: the columns ({column_list(rows)}) fit more than one format: {' and '.join(matching)}"
            raise DataError(problem, f"Choose one, for example  dataset.format={matching[0]}")
        counts.update(matching)
    if not counts:
        counts.update(_formats_with({name for row in rows for name in row}))
    if counts:
        return counts.most_common(1)[0][0]
    suggested, fix = suggested_columns(rows), _FORMATS_HINT
    _refuse_transcripts(rows, file, [suggested["output"]] if suggested else {name for row in rows for name in row}, columns)
    if suggested and not columns:
        question, answer = map(printable, suggested.values())
        fix = f"If {answer} is the answer to {question}:  {override('columns', suggested)}\n{fix}"
    raise DataError(f"{file}: no known format has these columns: {column_list(rows)}", fix)


def _check_columns(rows: list[Values], file: str, format_name: str, columns: Columns) -> None:
    # `rows` are not renamed
    header = {key for row in rows for key in row}
    for field, column in columns.items():
        if field not in _FORMAT_FIELDS:
            problem = f"dataset.columns: '{printable(field)}' is not a field of any format"
            raise DataError(problem, f"The fields are {', '.join(_FORMAT_FIELDS)}.")
        if column not in header and field not in ("role", "content"):  # `role` and `content` are keys of messages
            problem = f"{file}: dataset.columns maps {field} to a column '{printable(column)}', and the file has"
            raise DataError(f"{problem} {column_list(rows)}", "Use a column name of the file.")
    required = FORMATS[format_name].required if format_name in FORMATS else ()
    missing = [column for column in required if column not in {*header, *columns}]
    if missing:
        problem = f"{file}: format {format_name} needs the column(s) {', '.join(missing)}; the file has {column_list(rows)}"
        raise DataError(problem, _FORMATS_HINT)


def _refuse_other_data(rows: list[Values], file: str, mapped_columns: set[str]) -> None:
    filled_columns = {name for row in rows for name, value in row.items() if not is_blank(value)} - mapped_columns
    if "input_ids" in filled_columns:
        problem = "the rows are already tokenised (input_ids) for one model; finetune tokenises text itself"
        raise DataError(f"{file}: {problem}", "Set dataset.path to the file of texts that they were made from.")
    for chosen, rejected in (("chosen", "rejected"), ("chosen_response", "rejected_response"), ("response_j", "response_k")):
        if filled_columns.issuperset((chosen, rejected)):
            problem = f"this is preference data ({chosen}/{rejected}) for DPO; method sft trains on one answer per prompt"
            mapping = "" if chosen == "chosen" else f"  {override('columns', {'chosen': chosen, 'rejected': rejected})}"
            raise DataError(f"{file}: {problem}", f"To learn to prefer the chosen answers:  method=dpo{mapping}")


#: The start of a turn in a text: USER:, ### Human:, **User**:, <|im_start|>user, [INST]. {0} are speakers, {1} special tokens.
_TURN = r"(?:^|[\s>])(?:[#*\[(<]* ?(?:{0})[*\])>]*:|<[|｜](?:\w+\|>)?(?:{0})\b|{1})"
_USER = _TURN.format("user|human", r"\[INST\]|<start_of_turn>user")
_ASSISTANT = _TURN.format("assistant|gpt|chatgpt|chatbot|bot|ai", r"\[/INST\]|<start_of_turn>model")
# the atomic group (?>...) searches for the first user turn only once, which bounds the time
_TRANSCRIPT = re.compile(f"(?>.*?{_USER}).*{_ASSISTANT}", re.I | re.S)
_SAMPLE_ROWS, _SAMPLE_CHARACTERS = 50, 4_000


def _refuse_transcripts(rows: list[Values], file: str, names: Iterable[str], columns: Columns) -> None:
    for name in names:
        texts = [row[name] for row in rows[:_SAMPLE_ROWS] if isinstance(row.get(name), str)]
        conversations = [text for text in texts if _TRANSCRIPT.match(text[:_SAMPLE_CHARACTERS])]
        if 2 * len(conversations) > len(texts):
            raise DataError(
                f"{file}: '{printable(columns.get(name, name))}' is a transcript: a conversation in one text "
                "(USER: ... ASSISTANT: ...), so the user's turns would be trained on, too",
                'Write its turns as messages: [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]',
            )


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
    training_sources, _ = sources_of(dataset)
    first_rows = itertools.islice(training_sources[0].rows(), 100)
    renamed = [_rename_columns(row.values, dataset.columns) for row in first_rows if isinstance(row, Row)]
    filled_columns = columns_with_values(renamed)
    if filled_columns.issuperset(FORMATS["preference"].required):
        return "dpo", "the rows have a chosen and a rejected answer"
    has_answers = any(filled_columns.issuperset(FORMATS[name].required) for name in LABELLED_ANSWERS)
    good_or_bad = (True, False, "true", "false", "True", "False")  # other labels are classes
    for column in ("label", "kto_tag"):
        if has_answers and column in filled_columns and all(values.get(column) in good_or_bad for values in renamed):
            return "kto", f"the answers are marked good or bad ({column})"
    return "sft", "the rows have one answer each"


_FORMATS_HINT = "\n".join([
    "Write rows like one of these, or map your columns with dataset.columns (field: your column):",
    *(f"  {name}: {fmt.example_line}" for name, fmt in FORMATS.items()),
])  # fmt: skip


#: Last words of the names of columns with questions, and with answers; usual words first.
_QUESTIONS = "question query instruction prompt input problem request user human message source document article dialogue"
_ANSWERS = "answer response output completion reply solution assistant bot target summary translation"


def suggested_columns(rows: list[Values]) -> dict[str, str]:
    """Return the columns of instruction and output: by name, or the only two columns of text. Empty if unclear."""
    columns = dict.fromkeys(name for row in rows for name in row if "system" not in name.lower())
    texts = [name for name in columns if {type(row[name]) for row in rows if not is_missing(row.get(name))} == {str}]
    question, answer = _named(texts, _QUESTIONS), _named(texts, _ANSWERS)
    if len(texts) == 2:
        question = question or next(name for name in texts if name != answer)
        answer = answer or next(name for name in texts if name != question)
    return {"instruction": question, "output": answer} if question and answer else {}


def _named(texts: list[str], terms: str) -> str | None:
    # the shortest name wins: `question` before `follow_up_question`
    name_of_word = {words_of(name)[-1]: name for name in sorted(texts, key=len, reverse=True)}
    return next((name_of_word[term] for term in terms.split() if term in name_of_word), None)
