"""Rows, their tokens and images in Arrow tables of a few thousand rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from finetune.data.checks import BadRow
from finetune.data.column_semantics import MEDIA_TAGS
from finetune.data.conversation import Example
from finetune.data.pictures.source import source_from_dict, source_to_dict
from finetune.data.report import Refused

if TYPE_CHECKING:
    from finetune.data.tokens import Encoded

PICTURES = "pictures"  # name of the column, and of the field of an Example
_PICTURE = pa.struct([("path", pa.string()), ("digest", pa.string()), ("width", pa.int32()), ("height", pa.int32())])
_SEQUENCES = pa.list_(pa.list_(pa.int32()))


def picture_sizes(column: pa.ChunkedArray) -> np.ndarray:
    """Return (row, width, height) of each image in a column, in pixels."""
    lists = column.combine_chunks()
    rows, images = np.repeat(np.arange(len(lists)), lists.value_lengths().to_pylist()), lists.flatten()
    return np.array([rows, *(images.field(name).to_pylist() for name in ("width", "height"))], np.int64).T


@dataclass(frozen=True)
class PictureSummary:
    """Images of the rows used."""

    pictures: int
    rows: int  # with at least one
    largest: tuple[int, int]  # width and height in pixels of the image with the largest area
    megapixels: float  # of all together

    def lines(self) -> list[tuple[str, str]]:
        """Return labels and values for a table."""
        width, height = self.largest
        return [
            ("images", f"{self.pictures:,} in {self.rows:,} row(s)"),
            ("largest image", f"{width:,} x {height:,}, {width * height / 1e6:.2f} megapixels"),
            ("images together", f"{self.megapixels:,.1f} megapixels"),
        ]


def summarise_pictures(sizes: np.ndarray, row_mask: np.ndarray) -> PictureSummary | None:
    """Summarise `picture_sizes` of the rows in a mask; None without images."""
    used = sizes[row_mask[sizes[:, 0]]]
    if not len(used):
        return None
    areas = used[:, 1:].prod(axis=1)
    width, height = used[areas.argmax(), 1:].tolist()
    return PictureSummary(len(used), len(np.unique(used[:, 0])), (width, height), round(float(areas.sum()) / 1e6, 3))


#: Bits of a row, in the stored order: notes on its tokens, damage in its texts, its kind.
FLAGS = (
    "unprompted", "altered", "trimmed", "unthinking", "endless", "ended", "literal", "control", "unknown", "replaced", "media",
    "conversation", "pair", "labelled", "undesirable",
)  # fmt: skip
_BIT = {name: 1 << position for position, name in enumerate(FLAGS)}

_json = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
_sorted_json = json.JSONEncoder(sort_keys=True, check_circular=False).encode


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def table_of(examples: Sequence[Example], results: Sequence[list[Encoded] | BadRow]) -> pa.Table:
    """Return one shard, with a row for each example."""
    sequences = [[] if isinstance(result, BadRow) else result for result in results]
    errors = [result if isinstance(result, BadRow) else None for result in results]
    prompts = [
        [example.question() or example.text, example.tools, *(picture.digest for picture in example.pictures)]
        for example in examples
    ]
    references = [example.reference() for example in examples]
    contents = [_json(example.content()).encode("utf-8", "surrogatepass") for example in examples]
    columns = {
        "row": pa.array([example.row for example in examples], pa.int64()),
        "content": pa.array(map(_content_digest, examples, contents), pa.binary(16)),
        "asked": pa.array([_digest(_sorted_json(prompt)) for prompt in prompts], pa.uint64()),  # the order of keys is ignored
        "answer": pa.array([0 if text is None else _digest(text.strip()) or 1 for text in references], pa.uint64()),  # 0: none
        "flags": pa.array(map(_flags, examples, sequences), pa.uint32()),
        "example": pa.array(contents, pa.large_binary()),
        "bad_field": pa.array([error and error.field for error in errors], pa.string()),
        "bad_reason": pa.array([error and error.reason for error in errors], pa.string()),
        "input_ids": pa.array([[sequence.input_ids for sequence in row] for row in sequences], _SEQUENCES),
        "labels": pa.array([[sequence.labels for sequence in row] for row in sequences], _SEQUENCES),
        "trained": pa.array([[sequence.trained_count for sequence in row] for row in sequences], pa.list_(pa.int32())),
        "first": pa.array([[sequence.first_trained for sequence in row] for row in sequences], pa.list_(pa.int32())),
        PICTURES: pa.array([list(map(source_to_dict, example.pictures)) for example in examples], pa.list_(_PICTURE)),
    }
    return pa.table(columns)


def _content_digest(example: Example, content: bytes) -> bytes:
    # arguments in another order are the same call
    if example.tools or any("tool_calls" in message for message in example.messages):
        content = _sorted_json(example.content()).encode()
    return blake2b(content, digest_size=16).digest()


def _flags(example: Example, sequences: list[Encoded]) -> int:
    texts = example.texts()
    is_set = {
        "conversation": example.messages,
        "pair": example.prompt is not None,  # prompt and completion
        "labelled": example.desirable is not None,
        "undesirable": example.desirable is False,
        "media": any(tag in text for text in texts for tag in MEDIA_TAGS),
        "replaced": any("\ufffd" in text for text in texts),
    }
    names = {name for name, value in is_set.items() if value}.union(*(sequence.notes for sequence in sequences))
    return sum(_BIT[name] for name in names)


@dataclass
class TokenisedSource:
    """One source after reading: format, shards and refused rows."""

    file: str
    format: str
    columns: dict[str, str] = field(default_factory=dict)
    unused_columns: tuple[str, ...] = ()
    rows_read: int = 0
    refused: list[Refused] = field(default_factory=list)
    tables: list[pa.Table] = field(default_factory=list)


class StoredRows:
    """The rows of one split's sources in order, as columns."""

    def __init__(self, sources: Sequence[TokenisedSource]) -> None:
        self.sources = list(sources)
        # each table is a chunk, so nothing is copied; the empty one has the schema if there are no others
        self.table = pa.concat_tables([table_of([], []), *(table for source in self.sources for table in source.tables)])
        self.row_numbers = self.table["row"].to_numpy()
        self.prompt_digests = self.table["asked"].to_numpy()
        self.flags = self.table["flags"].to_numpy()
        sequences = self.table["input_ids"]
        self.sequence_counts = pc.list_value_length(sequences).to_numpy().astype(np.int64)  # of each row
        self.lengths = pc.list_value_length(pc.list_flatten(sequences)).to_numpy()  # of each sequence, like the next two
        self.trained_counts = pc.list_flatten(self.table["trained"]).to_numpy()
        self.first_trained = pc.list_flatten(self.table["first"]).to_numpy()

    def __len__(self) -> int:
        return len(self.row_numbers)

    @cached_property
    def content_digests(self) -> np.ndarray:
        digests = self.table["content"].combine_chunks()
        return np.frombuffer(digests.buffers()[1], np.uint8, digests.nbytes).reshape(-1, 16)

    @cached_property
    def picture_sizes(self) -> np.ndarray:
        return picture_sizes(self.table[PICTURES])

    @cached_property
    def source_indices(self) -> np.ndarray:  # of each row
        row_counts = [sum(table.num_rows for table in source.tables) for source in self.sources]
        return np.repeat(np.arange(len(self.sources)), row_counts)

    def highest_token(self) -> int:
        """Return the highest token id; -1 without tokens."""
        highest = pc.max(pc.list_flatten(pc.list_flatten(self.table["input_ids"]))).as_py()
        return -1 if highest is None else highest

    @cached_property
    def longest(self) -> np.ndarray:
        """Return the tokens of each row's longest sequence, or 0."""
        return self.by_row(np.maximum, self.lengths)

    def by_row(self, reduce: np.ufunc, values: np.ndarray) -> np.ndarray:
        """Reduce values of sequences to values of rows, 0 without sequences."""
        reduced = np.zeros(len(self), values.dtype)
        rows = np.flatnonzero(self.sequence_counts)  # reduceat takes no empty ranges
        if len(rows):
            reduced[rows] = reduce.reduceat(values, self.sequence_starts[rows])
        return reduced

    @cached_property
    def sequence_starts(self) -> np.ndarray:
        """Return the index of each row's first sequence, and their end."""
        return np.concatenate([[0], np.cumsum(self.sequence_counts)])

    @property
    def are_pairs(self) -> bool:
        return any(source.format == "preference" for source in self.sources)

    @property
    def are_labelled(self) -> bool:
        return any(source.format == "labelled" for source in self.sources)

    @cached_property
    def have_pictures(self) -> bool:
        return bool(len(self.picture_sizes))

    def has(self, flag: str) -> np.ndarray:
        return (self.flags & np.uint32(_BIT[flag])) != 0

    def row_location(self, index: int) -> tuple[str, int]:
        return self.sources[self.source_indices[index]].file, int(self.row_numbers[index])

    def example(self, index: int) -> Example:
        values = json.loads(self._value("example", index))
        values |= {name: tuple(values[name]) for name in ("messages", "answers", "tools", "rejected") if name in values}
        if values.pop(PICTURES, None):  # their digests
            values[PICTURES] = tuple(map(source_from_dict, self._value(PICTURES, index)))
        file, number = self.row_location(index)
        return Example(file, number, **values)

    @cached_property
    def sequences(self) -> pa.Table:
        """Return input_ids and labels of each sequence, `desirable` of labelled rows, and images if rows have any."""
        columns: dict[str, Any] = {name: pc.list_flatten(self.table[name]) for name in ("input_ids", "labels")}
        rows = pa.array(np.repeat(np.arange(len(self)), self.sequence_counts))
        if self.are_labelled:
            columns["desirable"] = pa.array(~self.has("undesirable")).take(rows)
        if self.have_pictures:
            columns[PICTURES] = self.table[PICTURES].take(rows)
        return pa.table(columns)

    def refusal(self, index: int) -> Refused:
        return Refused(*self.row_location(index), self._value("bad_field", index), self._value("bad_reason", index))

    def _value(self, name: str, index: int) -> Any:
        return self.table[name][int(index)].as_py()
