"""Read sources without a tokenizer, and choose the held-out rows and the method."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from finetune.data.column_advice import advice_for, advice_for_unused
from finetune.data.column_semantics import COLUMNS, FIELDS, UnusedColumns, fixes_of
from finetune.data.formats import FORMATS, LABELLED_ANSWERS, filled, rename_columns
from finetune.data.readers import Row
from finetune.data.report import Refused, printable
from finetune.data.row_parser import ParsedBatch, choose_parser
from finetune.data.sources import Source, is_local, sources_of
from finetune.errors import DataError
from finetune.settings import DatasetRecipe
from finetune.settings.methods import METHODS
from finetune.settings.schema import DEFAULT_SHARE, LEAST_ROWS

#: Values of a label that marks an answer good or bad; others are classes.
_MARKS = (True, False, "true", "false", "True", "False")
#: Rows read to detect the format.
_SAMPLE_ROWS = 1000
#: A batch ends after this number of rows, or of characters, as does the sample.
BATCH_ROWS, _BATCH_CHARACTERS = 4096, 2**24
#: Rows of a batch with images, as each image is decoded.
PICTURE_BATCH_ROWS = 256


def choose_held_out(digests: Sequence[int], size: float | None, seed: int) -> list[bool]:
    """Choose the rows that `test_split_size` holds out, by prompt digests. Raise DataError."""
    is_default, size = size is None, DEFAULT_SHARE * (len(digests) >= LEAST_ROWS) if size is None else size
    if not size:
        return [False] * len(digests)
    target_rows = max(1, round(len(digests) * size)) if size < 1 else int(size)
    if target_rows >= len(digests):
        raise DataError(
            f"dataset.test_split_size holds out {target_rows:,} of {len(digests):,} usable rows; none are left to train on",
            "Hold out fewer rows, or none:  dataset.test_split_size=0",
        )
    # rows with the same prompt stay together, so no held-out prompt is trained on
    row_counts = Counter(digests)
    shuffled = list(row_counts)
    random.Random(seed).shuffle(shuffled)
    held_out_digests: set[int] = set()
    held_out_rows = 0
    for digest in shuffled:
        if held_out_rows + row_counts[digest] <= target_rows:
            held_out_digests.add(digest)
            held_out_rows += row_counts[digest]
    if not held_out_digests and not is_default:
        raise DataError(
            "dataset.test_split_size: all rows have the same prompt; none can be held out",
            "Give other rows with dataset.eval_path.",
        )
    return [digest in held_out_digests for digest in digests]


class SourceReader:
    """Reads one source in batches."""

    def __init__(self, source: Source, dataset: DatasetRecipe, limit: int | None) -> None:
        self._remaining_rows: Iterator[Row | Refused] = itertools.islice(source.rows(), limit)
        self._sample = _take(self._remaining_rows, _SAMPLE_ROWS)
        self._dataset = dataset
        rows = [row for row in self._sample if isinstance(row, Row)]
        if not rows:
            problem = f"{source.name}: none of the first {len(self._sample):,} row(s) can be read"
            raise DataError([problem, str(self._sample[0])], "Correct the file.")
        try:
            folder = None if source.path is None else source.path.parent
            self.parser = choose_parser(source.name, [row.values for row in rows], dataset, folder)
        except DataError as error:
            raise advice_for(error, rows, source.name, dataset) from None
        #: Unread columns and fields; `finish` raises DataError if they stop the run.
        self.unused = UnusedColumns(self.parser.file, self.parser.format)

    def batches(self) -> Iterator[list[Row | Refused]]:
        rows = itertools.chain(self._sample, self._remaining_rows)
        batch_rows = PICTURE_BATCH_ROWS if self.parser.has_pictures else BATCH_ROWS
        while batch := _take(rows, batch_rows):
            yield batch

    def parsed(self) -> Iterator[ParsedBatch]:
        """Yield parsed batches, then `finish`."""
        for batch in self.batches():
            parsed = self.parser.parse(batch)
            self.unused.merge(parsed.unused)
            yield parsed
        self.finish()

    @property
    def unused_columns(self) -> tuple[str, ...]:
        fields = (f"messages[].{printable(name)}" for name in self.unused.uses[FIELDS])
        return tuple(dict.fromkeys((*self.parser.unused_columns, *map(printable, self.unused.uses[COLUMNS]), *fields)))

    def finish(self) -> None:
        """Raise DataError for unread columns or fields that may change the meaning."""
        if asked := self.unused.asked():
            sample = [row for row in self._sample if isinstance(row, Row)]
            fixes = [*fixes_of(asked, self.parser.file), *advice_for_unused(asked, sample, self.parser, self._dataset)]
            raise DataError(self.unused.problems(asked), "\n".join(fixes))


def _take(rows: Iterator[Row | Refused], most: int) -> list[Row | Refused]:
    taken: list[Row | Refused] = []
    characters = 0
    for row in itertools.islice(rows, most):
        taken.append(row)
        characters += _size(row.values) if isinstance(row, Row) else 0
        if characters > _BATCH_CHARACTERS:
            break
    return taken


def _size(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        return len(value)
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 8 + sum(map(_size, items))


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
