"""Rows and their tokens in columns: Arrow tables of a few thousand rows, in memory or mapped from a file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pyarrow as pa

from finetune.data.checks import BadRow
from finetune.data.formats import Example
from finetune.data.near import HASHES, MOST_ROWS, near, sketches
from finetune.data.report import Refused
from finetune.data.scripts import SCRIPTS, script_of

if TYPE_CHECKING:
    from finetune.data.tokens import Encoded

#: What the bits of a row say: notes of its tokens, damage in its texts, its kind, its answer's script. Files have this order.
FLAGS = (
    "unprompted", "altered", "endless", "literal", "control", "unknown", "replaced", "mojibake", "conversation", "pair",
    "system", *SCRIPTS,
)  # fmt: skip
_BIT = {name: 1 << place for place, name in enumerate(FLAGS)}
#: UTF-8 that was read as Windows-1252 or Latin-1: an accented letter, a quotation mark, an emoji.
_MOJIBAKE = re.compile(
    "\u00c3[\u0080-\u00bf\u0152\u0153\u0160\u0161\u017d\u017e\u2018-\u203a]|\u00e2\u20ac[\u0080-\u00bf\u2122\u0153\u201c\u201d\u00a6]|\u00f0\u0178"
)
_REPLACED = "\ufffd"
_LISTS = pa.list_(pa.list_(pa.int32()))
_json = json.JSONEncoder(ensure_ascii=False, check_circular=False).encode
_sorted = json.JSONEncoder(sort_keys=True, check_circular=False).encode


def digest(content: Any, size: int = 16) -> bytes:
    """A digest of an example's content, whatever the order of its keys."""
    return blake2b(_sorted(content).encode(), digest_size=size).digest()


def _written(content: Any) -> bytes:
    return _json(content).encode("utf-8", "surrogatepass")


def asked(example: Example) -> int:
    """A digest of the example's prompt and tools; of plain text, the text."""
    return int.from_bytes(digest([example.question() or example.text, example.tools], 8), "little")


def table_of(examples: Sequence[Example], results: Sequence[list[Encoded] | BadRow]) -> pa.Table:
    """One shard: a row for each example, with its sequences or the reason why it has none."""
    sequences = [[] if isinstance(result, BadRow) else result for result in results]
    bad = [result if isinstance(result, BadRow) else None for result in results]
    written = [_written(example.content()) for example in examples]
    columns = {
        "row": pa.array([example.row for example in examples], pa.int64()),
        "content": pa.array(map(_content_digest, examples, written), pa.binary(16)),
        "asked": pa.array([asked(example) for example in examples], pa.uint64()),
        "answer": pa.array([_answer(example) for example in examples], pa.uint64()),
        "flags": pa.array(map(_flags, examples, sequences), pa.uint32()),
        "sketch": pa.array(map(np.ndarray.tobytes, sketches(examples)), pa.binary(4 * HASHES)),
        "example": pa.array(written, pa.large_binary()),
        "bad_field": pa.array([one and one.field for one in bad], pa.string()),
        "bad_reason": pa.array([one and one.reason for one in bad], pa.string()),
        "input_ids": _nested([[one.input_ids for one in ones] for ones in sequences]),
        "labels": _nested([[one.labels for one in ones] for ones in sequences]),
        "trained": pa.array([[one.trained for one in ones] for ones in sequences], pa.list_(pa.int32())),
        "first": pa.array([[one.first for one in ones] for ones in sequences], pa.list_(pa.int32())),
    }
    return pa.table(columns)


def _content_digest(example: Example, written: bytes) -> bytes:
    """The digest of what is written, unless objects with keys in any order are in it."""
    if example.tools or any("tool_calls" in message for message in example.messages):
        written = _sorted(example.content()).encode()
    return blake2b(written, digest_size=16).digest()


def _answer(example: Example) -> int:
    answer = example.reference()
    return 0 if answer is None else int.from_bytes(blake2b(answer.strip().encode(), digest_size=8).digest(), "little") or 1


def _flags(example: Example, sequences: list[Encoded]) -> int:
    bits = (_BIT["conversation"] if example.messages else 0) | (_BIT["pair"] if example.prompt is not None else 0)
    bits |= _BIT["system"] if example.messages and example.messages[0]["role"] in ("system", "developer") else 0
    if script := script_of(example.reference() or example.text or ""):
        bits |= _BIT[script]
    for one in sequences:
        for note in one.notes:
            bits |= _BIT[note]
    for text in example.texts():
        if not text.isascii():
            bits |= (_BIT["replaced"] if _REPLACED in text else 0) | (_BIT["mojibake"] if _MOJIBAKE.search(text) else 0)
    return bits


def _nested(rows: list[list[np.ndarray]]) -> pa.ListArray:
    arrays = [array for row in rows for array in row]
    values = pa.array(np.concatenate([np.array([], dtype=np.int32), *arrays]))
    inner = pa.ListArray.from_arrays(_offsets(list(map(len, arrays))), values)
    return pa.ListArray.from_arrays(_offsets(list(map(len, rows))), inner)


def _offsets(lengths: list[int]) -> pa.Array:
    return pa.array(np.cumsum([0, *lengths]), pa.int32())


@dataclass
class Part:
    """What one source became: how it was read, its shards, and the rows that could not be read."""

    file: str
    format: str
    columns: dict[str, str] = field(default_factory=dict)
    unused_columns: tuple[str, ...] = ()
    read: int = 0
    refused: list[Refused] = field(default_factory=list)
    tables: list[pa.Table] = field(default_factory=list)
    weight: float = 1.0  # how often each of its rows is used in an epoch


class Stored:
    """The rows of all sources of one side (training or held out), in order, as columns. Rows are numbered from 0 here."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = list(parts)
        self.tables = [table for part in self.parts for table in part.tables]
        self._files = [part.file for part in self.parts for _ in part.tables]
        self.starts = np.cumsum([0, *(table.num_rows for table in self.tables)])
        self.row = self._column("row", np.int64)
        self.asked = self._column("asked", np.uint64)
        self.answer = self._column("answer", np.uint64)
        self.flags = self._column("flags", np.uint32)
        self.count = self._join([_counts(table["input_ids"]) for table in self.tables], np.int64)
        self.length = self._join([_lengths(_inner(table["input_ids"])) for table in self.tables], np.int32)
        self.trained = self._join([_numbers(_inner(table["trained"]), np.int32) for table in self.tables], np.int32)
        self.first = self._join([_numbers(_inner(table["first"]), np.int32) for table in self.tables], np.int32)

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def content(self) -> np.ndarray:
        """The 16 bytes of each row's digest."""
        return self._bytes("content", 16)

    @cached_property
    def source(self) -> np.ndarray:
        """The number of each row's part."""
        return np.repeat(np.arange(len(self.parts)), [sum(one.num_rows for one in part.tables) for part in self.parts])

    @property
    def weights(self) -> np.ndarray:
        """How often each row is used in an epoch."""
        return np.array([part.weight for part in self.parts])[self.source]

    def near(self, mine: np.ndarray) -> tuple[np.ndarray, int]:
        """Numbers of the rows among `mine` that say nearly the same as an earlier one, and how many were compared."""
        rows = np.flatnonzero(mine)[:MOST_ROWS]
        return rows[near(self._bytes("sketch", 4 * HASHES).view(np.uint32)[rows], self.content[rows])], len(rows)

    def repeated(self, mine: np.ndarray) -> np.ndarray:
        """Numbers of the rows among `mine` that equal an earlier one of them; told by 8 bytes of the digests."""
        rows = np.flatnonzero(mine)
        values = np.ascontiguousarray(self.content[:, :8]).view(np.uint64).ravel()[rows]
        again = np.ones(len(rows), dtype=bool)
        again[np.unique(values, return_index=True)[1]] = False
        return rows[again]

    def highest_token(self) -> int:
        """The highest id of all tokens; -1 without any."""
        import pyarrow.compute as pc

        found = (pc.max(_inner(table["input_ids"]).flatten()).as_py() for table in self.tables)
        return max((one for one in found if one is not None), default=-1)

    @cached_property
    def longest(self) -> np.ndarray:
        """Tokens of the longest sequence of each row; 0 for rows without one."""
        longest = np.zeros(len(self), np.int32)
        with_tokens = np.flatnonzero(self.count)
        if len(with_tokens):
            longest[with_tokens] = np.maximum.reduceat(self.length, self.sequence_starts[with_tokens])
        return longest

    @cached_property
    def sequence_starts(self) -> np.ndarray:
        """Number of each row's first sequence, and of the end."""
        return np.concatenate([[0], np.cumsum(self.count)])

    def has(self, flag: str) -> np.ndarray:
        """Whether each row has the flag."""
        return (self.flags & np.uint32(_BIT[flag])) != 0

    def place(self, index: int) -> tuple[str, int]:
        """File and row number in the file."""
        return self._files[self._table(index)], int(self.row[index])

    def example(self, index: int) -> Example:
        """The source row."""
        table = self._table(index)
        values = json.loads(self.tables[table]["example"][int(index - self.starts[table])].as_py())
        lists: dict[str, Any] = {name: tuple(values.pop(name)) for name in ("messages", "answers", "tools") if name in values}
        return Example(file=self._files[table], row=int(self.row[index]), **lists, **values)

    def refusal(self, index: int) -> Refused:
        """Why a row without sequences can't be trained on."""
        table = self._table(index)
        place = int(index - self.starts[table])
        name, reason = (self.tables[table][column][place].as_py() for column in ("bad_field", "bad_reason"))
        return Refused(*self.place(index), name, reason)

    def pieces(self, keep: np.ndarray) -> Iterator[tuple[pa.Table, np.ndarray, slice]]:
        """Each shard's sequences (input_ids, labels), which of them to keep, and their numbers."""
        end = 0
        for table in self.tables:
            columns = {name: _inner(table[name]) for name in ("input_ids", "labels")}
            start, end = end, end + len(columns["input_ids"])
            yield pa.table(columns), keep[start:end], slice(start, end)

    def _table(self, index: int) -> int:
        return int(np.searchsorted(self.starts, index, side="right")) - 1

    def _bytes(self, name: str, width: int) -> np.ndarray:
        flat = [
            np.frombuffer(chunk.buffers()[1], np.uint8)[width * chunk.offset : width * (chunk.offset + len(chunk))]
            for table in self.tables
            for chunk in table[name].chunks
            if len(chunk)
        ]
        return self._join(flat, np.uint8).reshape(-1, width)

    def _column(self, name: str, kind: Any) -> np.ndarray:
        return self._join([_numbers(_whole(table[name]), kind) for table in self.tables], kind)

    @staticmethod
    def _join(arrays: list[np.ndarray], kind: Any) -> np.ndarray:
        return np.concatenate([np.array([], dtype=kind), *arrays]).astype(kind, copy=False)


class StoredExamples(Sequence[Example]):
    """Some rows of `Stored`, each read when it is asked for."""

    def __init__(self, stored: Stored, index: np.ndarray) -> None:
        self._stored, self._index = stored, index

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, place: int) -> Example: ...
    @overload
    def __getitem__(self, place: slice) -> list[Example]: ...
    def __getitem__(self, place: int | slice) -> Example | list[Example]:
        if isinstance(place, slice):
            return [self._stored.example(int(index)) for index in self._index[place]]
        return self._stored.example(int(self._index[place]))


def _whole(column: pa.ChunkedArray) -> Any:
    """The column as one array; each shard has one chunk, so nothing is copied."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _inner(column: pa.ChunkedArray) -> Any:
    return _whole(column).flatten()


def _numbers(array: Any, kind: Any) -> np.ndarray:
    """The numbers of an array without nulls, in place; its own `to_numpy` imports pandas, which takes half a second."""
    size = np.dtype(kind).itemsize
    return np.frombuffer(array.buffers()[1], kind, len(array), array.offset * size) if len(array) else np.array([], kind)


def _counts(column: pa.ChunkedArray) -> np.ndarray:
    return _lengths(_whole(column))


def _lengths(lists: Any) -> np.ndarray:
    return np.diff(_numbers(lists.offsets, np.int32))
