"""A recipe's `dataset:` -> examples and refused rows, for training and held out. Needs no tokenizer."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from finetune.data.checks import BadRow
from finetune.data.formats import FORMATS, Example, check_columns, detect, parse, renamed, unused_columns, usual_columns
from finetune.data.meaning import Unused, UnusedField, check_placeholders, recognise, without
from finetune.data.readers import Row
from finetune.data.report import Refused
from finetune.data.sources import Source, bundled_eval, find_sources
from finetune.errors import DataError, RecipeError
from finetune.recipe import DatasetRecipe

#: Rows read to detect the format.
_SAMPLE = 1000


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

    @property
    def duplicates(self) -> list[Example]:
        """Examples equal to an earlier one."""
        seen: set[bytes] = set()
        return [example for example in self.examples if _seen_before(digest(example.content()), seen)]


@dataclass(frozen=True)
class Examples:
    """The training and held-out splits of a dataset; `eval` is None when nothing is held out."""

    train: Rows
    eval: Rows | None = None

    @property
    def shared(self) -> list[Example]:
        """Held-out rows whose prompt (plain text: the text) is also in the training rows."""
        if self.eval is None:
            return []
        asked = {_asked(example) for example in self.train.examples}
        return [example for example in self.eval.examples if _asked(example) in asked]


def read_examples(dataset: DatasetRecipe, seed: int = 42) -> Examples:
    """Read, check and split the rows of `dataset`. `seed` chooses the rows that `test_split_size` holds out.

    Raises DataError for files that can't be read at all; bad rows are in `refused`, whatever `on_bad_rows` says.
    """
    _check_holdout(dataset)
    train_sources = find_sources(dataset.path, config=dataset.name, split=dataset.split, revision=dataset.revision)
    eval_sources = _eval_sources(dataset, train_sources)
    train = _read_side(train_sources, dataset, dataset.max_rows)
    if eval_sources:
        return Examples(train, _read_side(eval_sources, dataset, None))
    return _hold_out(train, dataset.test_split_size, seed) if dataset.test_split_size else Examples(train)


def digest(content: Any) -> bytes:
    """A 16-byte digest of an example's content."""
    return blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).digest()


def _seen_before(value: bytes, seen: set[bytes]) -> bool:
    known = value in seen
    seen.add(value)
    return known


def _asked(example: Example) -> bytes:
    return digest([example.question() or example.text, example.tools])


def _check_holdout(dataset: DatasetRecipe) -> None:
    size = dataset.test_split_size
    ways = [name for name in ("eval_path", "eval_split", "test_split_size") if getattr(dataset, name)]
    if len(ways) > 1:
        raise RecipeError(f"dataset.{ways[0]} and dataset.{ways[1]} both choose the held-out rows", "Keep one of them.")
    if size >= 1 and size != int(size):
        raise RecipeError(f"dataset.test_split_size is {size}; it must be a fraction below 1 or a whole number of rows")


def _eval_sources(dataset: DatasetRecipe, train: list[Source]) -> list[Source]:
    if dataset.eval_path:
        return find_sources(dataset.eval_path, side="eval", config=dataset.name, split=dataset.split, revision=dataset.revision)
    if dataset.eval_split:
        local = [source.name for source in train if source.path is not None]
        if local:
            raise RecipeError(
                f"dataset.eval_split names a split of a hub dataset; {local[0]} is a local file", "Use dataset.eval_path."
            )
        return [replace(source, split=dataset.eval_split) for source in train]
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
    rows: Iterator[Row | Refused] = itertools.islice(source.rows(), limit)
    sample = list(itertools.islice(rows, _SAMPLE))
    readable = [row.values for row in sample if isinstance(row, Row)]
    if not readable:
        first = next(row for row in sample if isinstance(row, Refused))
        raise DataError(
            [f"{source.name}: none of the first {len(sample):,} row(s) can be read", str(first)], "Correct the file."
        )
    columns, ignored = dataset.columns, dataset.ignore_columns
    recognise(readable, source.name, {*columns.values(), *ignored})
    readable = [without(values, ignored) for values in readable]
    check_columns(readable, source.name, dataset.format, columns)
    if not columns and dataset.format == "auto":
        columns = usual_columns(readable)
    mapped = [renamed(values, columns) for values in readable]
    name = detect(mapped, source.name, columns) if dataset.format == "auto" else dataset.format
    examples: list[Example] = []
    refused: list[Refused] = []
    unused = Unused(source.name, name, (*FORMATS[name].needs, *FORMATS[name].reads))
    count = 0
    for count, row in enumerate(itertools.chain(sample, rows), 1):  # noqa: B007 - counted for after the loop
        if isinstance(row, Refused):
            refused.append(row)
            continue
        values = renamed(without(row.values, ignored), columns)
        unused.see(values, row.number)
        try:
            example = parse(values, name, columns, row.file, row.number)
            check_placeholders(row.values, example.texts())
            examples.append(example)
        except UnusedField as field:
            unused.field(field.name, row.number)
        except BadRow as bad:
            refused.append(Refused(row.file, row.number, columns.get(bad.field or "", bad.field), bad.reason))
    unused.refuse()
    header = list(dict.fromkeys(column for values in mapped for column in values))
    return Rows((source.name,), name, count, examples, refused, unused_columns(header, name), 0, columns)


def _hold_out(rows: Rows, size: float, seed: int) -> Examples:
    """Split by `seed`. Rows with the same prompt stay together, so no held-out prompt is trained on."""
    wanted = max(1, round(len(rows.examples) * size)) if size < 1 else int(size)
    if wanted >= len(rows.examples):
        raise DataError(
            f"dataset.test_split_size holds out {wanted:,} of {len(rows.examples):,} usable rows; none are left to train on",
            "Hold out fewer rows, or none:  dataset.test_split_size=0",
        )
    groups: dict[bytes, list[int]] = {}
    for index, example in enumerate(rows.examples):
        groups.setdefault(_asked(example), []).append(index)
    order = list(groups.values())
    random.Random(seed).shuffle(order)
    held: set[int] = set()
    for group in order:
        if len(held) + len(group) <= wanted:
            held.update(group)
    if not held:
        raise DataError(
            "dataset.test_split_size: all rows have the same prompt; none can be held out",
            "Give other rows with dataset.eval_path.",
        )
    kept = [example for index, example in enumerate(rows.examples) if index not in held]
    out = [rows.examples[index] for index in sorted(held)]
    return Examples(replace(rows, examples=kept, held_out=len(out)), Rows(rows.files, rows.format, len(out), out))
