"""One split of the data under a max_length: which rows are used, truncated or cut into chunks, and their sequences."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from finetune.data.report import Refused
from finetune.data.shards import Stored, StoredExamples
from finetune.data.tokens import NOT_TRAINED

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

#: Sequences that differ from the stored ones are kept in memory up to this size, and in temporary files above it.
_IN_MEMORY_BYTES = 64 * 2**20
_NO_LIMIT = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Side:
    """One split (training or held out) before max_length applies. `mine`: which of the stored rows are of this split."""

    stored: Stored
    mine: np.ndarray
    held_out: int = 0
    split_off: bool = False  # held out from the training files

    @property
    def files(self) -> tuple[str, ...]:
        """The names of its sources."""
        return tuple(part.file for part in self.stored.parts)

    @property
    def read(self) -> int:
        """Rows read for this split."""
        return int(self.mine.sum()) if self.split_off else sum(part.read for part in self.stored.parts)

    @property
    def unread(self) -> list[Refused]:
        """Rows that can't be read."""
        return [] if self.split_off else [row for part in self.stored.parts for row in part.refused]


class LimitedSide:
    """One split under a max_length: its rows as masks, and its sequences.

    `weighted`: rows are used as often as `dataset.weights` says, those for a fraction of it chosen by `seed`.
    """

    def __init__(self, side: Side, max_length: int | None, excess: str, *, weighted: bool = False, seed: int = 0) -> None:
        self.side, self.max_length = side, max_length
        self._limit = _NO_LIMIT if max_length is None else max_length
        stored = self.stored = side.stored
        bad = side.mine & (stored.count == 0)
        long = side.mine & (stored.longest > self._limit)
        nothing = np.zeros(len(stored), dtype=bool)
        cut_away = long & self._begins_after_the_limit() if excess == "truncate" and long.any() else nothing
        is_text = ~(stored.has("conversation") | stored.has("pair"))
        self.chunked = long & is_text if excess == "chunk" else nothing
        self.too_long = long & ~cut_away & ~self.chunked
        self.truncated = self.too_long if excess == "truncate" else nothing
        usable = side.mine & ~bad & ~cut_away & (~self.too_long | self.truncated)
        self.passes = _passes(stored, usable, seed) if weighted else [usable]
        self.used = self.passes[0]
        self.left_out = int((usable & ~self.used).sum())
        refused = [stored.refusal(index) for index in np.flatnonzero(bad).tolist()]
        self.refused = [*side.unread, *refused, *(self._cut_away(index) for index in np.flatnonzero(cut_away).tolist())]
        over = stored.length[np.repeat(self.too_long, stored.count)].astype(np.int64)
        self.tokens_dropped = int(np.maximum(over - (self._limit if excess == "truncate" else 0), 0).sum())
        self.sequences = [np.repeat(rows, stored.count) for rows in self.passes]
        self._in_chunks = np.repeat(self.chunked, stored.count) & (stored.length > self._limit)
        self.lengths = np.concatenate([self._lengths_of(which) for which in self.sequences])

    def _lengths_of(self, which: np.ndarray) -> np.ndarray:
        """Tokens of each sequence that the stored ones `which` become."""
        length, chunked = self.stored.length[which], self._in_chunks[which]
        return _chunk_lengths(length, self._limit) if chunked.any() else np.minimum(length, self._limit)

    @cached_property
    def trained_tokens(self) -> int:
        """Trained tokens of the rows used."""
        count = 0
        for which in self.sequences:
            cut = which & (self.stored.length > self._limit) & ~self._in_chunks
            count += int(self.stored.trained[which & ~cut].sum(dtype=np.int64))
            count -= len(self._lengths_of(which)) - int(which.sum())  # the first token of a sequence is not trained
            for table, keep, _ in self.stored.pieces(cut) if cut.any() else ():
                for labels in table["labels"].filter(keep):
                    count += int((labels.values.to_numpy()[: self._limit] != NOT_TRAINED).sum())
        return count

    def examples(self) -> StoredExamples:
        """The source rows used."""
        return StoredExamples(self.stored, np.flatnonzero(self.used))

    def longest(self, most: int) -> list[tuple[tuple[str, int], int]]:
        """Places and tokens of the longest rows over max_length."""
        rows = np.flatnonzero(self.too_long)
        order = rows[np.argsort(-self.stored.longest[rows], kind="stable")][:most]
        return [(self.stored.place(index), int(self.stored.longest[index])) for index in order]

    def dataset(self, fingerprint: str) -> Dataset:
        """The sequences as a dataset. Those of shards that are used whole stay in their files."""
        import pyarrow as pa
        from datasets import Dataset
        from datasets.table import InMemoryTable

        schema = pa.schema([(name, pa.list_(pa.int32())) for name in ("input_ids", "labels")])
        table = pa.concat_tables([schema.empty_table(), *self._pieces(schema)])
        return Dataset(InMemoryTable(table), fingerprint=fingerprint)

    def _pieces(self, schema: pa.Schema) -> Iterator[pa.Table]:
        made: list[pa.Table] = []
        for table, keep, numbers in (piece for which in self.sequences for piece in self.stored.pieces(which)):
            over = bool((keep & (self.stored.length[numbers] > self._limit)).any())
            as_stored = bool(keep.all()) and not over
            if not as_stored:
                kept = table.filter(keep)
                if over and self._in_chunks.any():
                    kept = _in_chunks(kept, _chunk_lengths(self.stored.length[numbers][keep], self._limit))
                made.append((_shortened(kept, self._limit) if over else kept).cast(schema))
            if as_stored or sum(one.nbytes for one in made) > _IN_MEMORY_BYTES:
                yield from _in_file(made) if sum(one.nbytes for one in made) > _IN_MEMORY_BYTES else made
                made = []
            if as_stored:
                yield table.cast(schema)
        yield from made

    def _begins_after_the_limit(self) -> np.ndarray:
        """Whether a sequence of each row would have no trained token after truncation."""
        with_tokens = np.flatnonzero(self.stored.count)
        found = np.zeros(len(self.stored), dtype=bool)
        begins = (self.stored.first >= self._limit).astype(np.int64)
        found[with_tokens] = np.add.reduceat(begins, self.stored.sequence_starts[with_tokens]) > 0
        return found

    def _cut_away(self, index: int) -> Refused:
        starts = self.stored.sequence_starts
        first = self.stored.first[starts[index] : starts[index + 1]]
        place = int(first[first >= self._limit][0])
        reason = (
            f"no trained token is left after truncation to {self._limit:,} tokens: the answer begins at token {place + 1:,}"
        )
        return Refused(*self.stored.place(index), None, reason)


def _passes(stored: Stored, usable: np.ndarray, seed: int) -> list[np.ndarray]:
    """The rows of each pass over the data in an epoch: those of weight 2.5 are in two, and half of them in a third."""
    weights, sources = stored.weights, stored.source
    passes = []
    for number in range(max(1, math.ceil(weights.max(initial=1.0)))):
        rows = usable & (weights >= number + 1)
        for source in np.unique(sources[usable & (weights > number) & (weights < number + 1)]):
            mine = np.flatnonzero(usable & (sources == source))
            wanted = round((stored.parts[source].weight - number) * len(mine))
            rows[np.random.default_rng([seed, int(source)]).permutation(mine)[:wanted]] = True
        passes.append(rows)
    return passes


def _chunk_lengths(length: np.ndarray, limit: int) -> np.ndarray:
    """Lengths of the pieces, as equal as can be and none over the limit, of sequences of these lengths."""
    count = -(-length // limit)
    place = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return np.repeat(length // count, count) + (place < np.repeat(length % count, count))


def _in_chunks(table: pa.Table, lengths: np.ndarray) -> pa.Table:
    """The same tokens as sequences of these lengths; the first of each is not trained."""
    import pyarrow as pa

    ends = np.cumsum(lengths)
    offsets = pa.array(np.append(0, ends), pa.int32())
    values = {name: table[name].combine_chunks().flatten() for name in table.column_names}
    labels = values["labels"].to_numpy(zero_copy_only=False).copy()
    labels[ends - lengths] = NOT_TRAINED
    values["labels"] = pa.array(labels)
    return pa.table({name: pa.ListArray.from_arrays(offsets, column) for name, column in values.items()})


def _shortened(table: pa.Table, limit: int) -> pa.Table:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pa.table({
        name: pc.list_slice(table[name], 0, limit, return_fixed_size_list=False) for name in table.column_names
    })  # fmt: skip


def _in_file(tables: list[pa.Table]) -> list[pa.Table]:
    """The tables in a temporary file, which is gone when nothing uses it any more."""
    import pyarrow as pa

    with tempfile.NamedTemporaryFile(suffix=".arrow", delete=False) as file, pa.ipc.new_file(file, tables[0].schema) as writer:
        for table in tables:
            writer.write_table(table)
    with pa.memory_map(file.name) as opened:
        mapped = pa.ipc.open_file(opened).read_all()
    with suppress(PermissionError):  # Windows keeps what is mapped
        Path(file.name).unlink()
    return [mapped]
