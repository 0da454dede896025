"""A recipe's `dataset:` -> examples and refused rows, for training and held out. Needs no tokenizer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from finetune.data.checks import BadRow
from finetune.data.formats import FORMATS, Example, check_columns, detect, parse, renamed, unused_columns, usual_columns
from finetune.data.meaning import Unused, UnusedField, check_placeholders, recognise, without
from finetune.data.readers import Row
from finetune.data.report import Refused
from finetune.data.shards import asked
from finetune.data.sources import Source, bundled_eval, find_sources
from finetune.errors import DataError, RecipeError
from finetune.recipe import DatasetRecipe

#: Rows read to detect the format.
_SAMPLE = 1000


#: A batch ends after so many rows, or so many characters.
BATCH_ROWS, _BATCH_CHARACTERS = 4096, 2**24


@dataclass(frozen=True)
class Rows:
    """The rows of one split (training or held out): examples, refused rows, and how the files were read."""

    files: tuple[str, ...]
    format: str
    read: int
    examples: list[Example]
    refused: list[Refused] = field(default_factory=list)
    unused_columns: tuple[str, ...] = ()
    held_out: int = 0
    columns: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Examples:
    """The training and held-out splits of a dataset; `eval` is None when nothing is held out."""

    train: Rows
    eval: Rows | None = None


def read_examples(dataset: DatasetRecipe, seed: int = 42) -> Examples:
    """Read, check and split the rows of `dataset` in memory. `seed` chooses the rows that `test_split_size` holds out.

    Raises DataError for files that can't be read at all; bad rows are in `refused`, whatever `on_bad_rows` says.
    """
    sources, eval_sources = sources_of(dataset)
    train = _read_side(sources, dataset, dataset.max_rows)
    if eval_sources:
        return Examples(train, _read_side(eval_sources, dataset, None))
    if not dataset.test_split_size:
        return Examples(train)
    held = held_out([asked(example) for example in train.examples], dataset.test_split_size, seed)
    out = [example for example, is_held in zip(train.examples, held, strict=True) if is_held]
    kept = [example for example, is_held in zip(train.examples, held, strict=True) if not is_held]
    return Examples(replace(train, examples=kept, held_out=len(out)), Rows(train.files, train.format, len(out), out))


def sources_of(dataset: DatasetRecipe) -> tuple[list[Source], list[Source]]:
    """The sources of the training rows and of the held-out ones, checked to exist. Raises DataError and RecipeError."""
    _check_holdout(dataset)
    only = bool(dataset.eval_split) or "split" in dataset.model_fields_set
    train = find_sources(
        dataset.path, config=dataset.name, split=dataset.split, revision=dataset.revision, only=only, weights=dataset.weights
    )
    return train, _eval_sources(dataset)


def held_out(asked: Sequence[int], size: float, seed: int) -> list[bool]:
    """Which rows `test_split_size` holds out, by their prompts. Rows with the same prompt stay together, so no held-out prompt
    is trained on. Raises DataError."""
    wanted = max(1, round(len(asked) * size)) if size < 1 else int(size)
    if wanted >= len(asked):
        raise DataError(
            f"dataset.test_split_size holds out {wanted:,} of {len(asked):,} usable rows; none are left to train on",
            "Hold out fewer rows, or none:  dataset.test_split_size=0",
        )
    groups: dict[int, int] = {}
    for prompt in asked:
        groups[prompt] = groups.get(prompt, 0) + 1
    order = list(groups)
    random.Random(seed).shuffle(order)
    held: set[int] = set()
    count = 0
    for prompt in order:
        if count + groups[prompt] <= wanted:
            held.add(prompt)
            count += groups[prompt]
    if not held:
        raise DataError(
            "dataset.test_split_size: all rows have the same prompt; none can be held out",
            "Give other rows with dataset.eval_path.",
        )
    return [prompt in held for prompt in asked]


def _check_holdout(dataset: DatasetRecipe) -> None:
    size = dataset.test_split_size
    ways = [name for name in ("eval_path", "eval_split", "test_split_size") if getattr(dataset, name)]
    if len(ways) > 1:
        raise RecipeError(f"dataset.{ways[0]} and dataset.{ways[1]} both choose the held-out rows", "Keep one of them.")
    paths = [dataset.path] if isinstance(dataset.path, str) else dataset.path
    if dataset.weights and len(dataset.weights) != len(paths):
        raise RecipeError(
            f"dataset.weights has {len(dataset.weights)} number(s) for {len(paths)} path(s)",
            "Give one for each path, in order.",
        )
    if size >= 1 and size != int(size):
        raise RecipeError(f"dataset.test_split_size is {size}; it must be a fraction below 1 or a whole number of rows")


def _eval_sources(dataset: DatasetRecipe) -> list[Source]:
    if dataset.eval_path:
        return find_sources(dataset.eval_path, side="eval", config=dataset.name, split=dataset.split, revision=dataset.revision)
    if dataset.eval_split:
        return find_sources(
            dataset.path, config=dataset.name, split=dataset.eval_split, revision=dataset.revision, only=True, has_splits=True
        )
    return [] if dataset.test_split_size else bundled_eval(dataset.path)


def _read_side(sources: list[Source], dataset: DatasetRecipe, limit: int | None) -> Rows:
    """The rows of all sources, each in its own format unless the recipe names one. At most `limit` rows are read."""
    parts: list[Rows] = []
    for source in sources:
        left = None if limit is None else limit - sum(part.read for part in parts)
        if left == 0:
            break
        parts.append(_read_source(source, dataset, left))
    return Rows(
        files=tuple(file for part in parts for file in part.files),
        format=", ".join(dict.fromkeys(part.format for part in parts)),
        read=sum(part.read for part in parts),
        examples=[example for part in parts for example in part.examples],
        refused=[row for part in parts for row in part.refused],
        unused_columns=tuple(dict.fromkeys(column for part in parts for column in part.unused_columns)),
        columns={name: column for part in parts for name, column in part.columns.items()},
    )


def _read_source(source: Source, dataset: DatasetRecipe, limit: int | None) -> Rows:
    reading = Reading(source, dataset, limit)
    examples: list[Example] = []
    refused: list[Refused] = []
    for batch in reading.batches():
        parsed = reading.how.parse(batch)
        reading.add(parsed.unused)
        examples += parsed.examples
        refused += parsed.refused
    reading.finish()
    how = reading.how
    return Rows((source.name,), how.format, reading.read, examples, refused, how.unused_columns, 0, how.columns)


@dataclass(frozen=True)
class Parsed:
    """Rows of one batch: examples, refused rows, and those with columns or fields that change the meaning and aren't used."""

    examples: list[Example]
    refused: list[Refused]
    unused: dict[str, list[int]]


@dataclass(frozen=True)
class HowToRead:
    """How the rows of a source are read: decided by its first ones, the same for all."""

    file: str
    format: str
    columns: dict[str, str]
    ignored: tuple[str, ...]
    unused_columns: tuple[str, ...]

    def parse(self, batch: list[Row | Refused]) -> Parsed:
        """The examples of some rows."""
        examples: list[Example] = []
        refused: list[Refused] = []
        unused = self.unused()
        for row in batch:
            if isinstance(row, Refused):
                refused.append(row)
                continue
            values = renamed(without(row.values, self.ignored), self.columns)
            unused.see(values, row.number)
            try:
                example = parse(values, self.format, self.columns, row.file, row.number)
                check_placeholders(row.values, example.texts())
                examples.append(example)
            except UnusedField as field:
                unused.field(field.name, row.number)
            except BadRow as bad:
                refused.append(Refused(row.file, row.number, self.columns.get(bad.field or "", bad.field), bad.reason))
        return Parsed(examples, refused, unused.rows)

    def unused(self) -> Unused:
        """Counts rows with unused columns that change the meaning."""
        return Unused(self.file, self.format, (*FORMATS[self.format].needs, *FORMATS[self.format].reads))


class Reading:
    """One source while it is read: how, and its rows in batches. Raises DataError when it can't be read at all."""

    def __init__(self, source: Source, dataset: DatasetRecipe, limit: int | None) -> None:
        self._rows: Iterator[Row | Refused] = itertools.islice(source.rows(), limit)
        self._sample = list(itertools.islice(self._rows, _SAMPLE))
        self.how = _decided(source.name, self._sample, dataset)
        self.read = 0
        self._unused = self.how.unused()

    def batches(self) -> Iterator[list[Row | Refused]]:
        """All rows, in batches that depend only on the rows."""
        batch: list[Row | Refused] = []
        size = 0
        for row in itertools.chain(self._sample, self._rows):
            batch.append(row)
            size += _characters(row.values) if isinstance(row, Row) else 0
            if len(batch) == BATCH_ROWS or size > _BATCH_CHARACTERS:
                self.read += len(batch)
                yield batch
                batch, size = [], 0
        self.read += len(batch)
        if batch:
            yield batch

    def add(self, unused: dict[str, list[int]]) -> None:
        """Count what a batch has that isn't used."""
        self._unused.add(unused)

    @property
    def is_refused(self) -> bool:
        """Whether `finish` will raise: no later row needs tokens."""
        return self._unused.is_refused

    def finish(self) -> None:
        """Raise DataError when columns or fields that change the meaning aren't used."""
        self._unused.refuse(self.read)


def _decided(name: str, sample: list[Row | Refused], dataset: DatasetRecipe) -> HowToRead:
    readable = [row.values for row in sample if isinstance(row, Row)]
    if not readable:
        first = next(row for row in sample if isinstance(row, Refused))
        raise DataError([f"{name}: none of the first {len(sample):,} row(s) can be read", str(first)], "Correct the file.")
    columns, ignored = dataset.columns, dataset.ignore_columns
    recognise(readable, name, {*columns.values(), *ignored})
    readable = [without(values, ignored) for values in readable]
    check_columns(readable, name, dataset.format, columns)
    if not columns and dataset.format == "auto":
        columns = usual_columns(readable)
    mapped = [renamed(values, columns) for values in readable]
    chosen = detect(mapped, name, columns) if dataset.format == "auto" else dataset.format
    header = list(dict.fromkeys(column for values in mapped for column in values))
    return HowToRead(name, chosen, columns, tuple(ignored), unused_columns(header, chosen))


def _characters(value: Any) -> int:
    """About the size of a row."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return 8 + sum(map(_characters, value.values()))
    return 8 + sum(map(_characters, value)) if isinstance(value, list) else 8
