"""Apply max_length to one split of the data, and pack rows into sequences."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from finetune.data.conversation import Example
from finetune.data.report import Refused
from finetune.data.shards import StoredRows
from finetune.errors import DataError, FinetuneError
from finetune.settings.compatibility import Sizes
from finetune.settings.methods import NOT_TRAINED

if TYPE_CHECKING:
    from datasets import Dataset

    from finetune.data.pictures.processing import PictureProcessor

_NO_LIMIT = np.iinfo(np.int32).max


@dataclass(frozen=True)
class DataSplit:
    """The training or held-out split before max_length applies."""

    stored: StoredRows
    row_mask: np.ndarray  # which stored rows belong to the split
    split_off: bool = False  # taken from the training files by test_split_size

    @property
    def unused_columns(self) -> tuple[str, ...]:
        # the training split reports the columns of the shared files
        columns = (name for source in self.stored.sources for name in source.unused_columns)
        return () if self.split_off else tuple(dict.fromkeys(columns))

    @property
    def rows_read(self) -> int:
        return int(self.row_mask.sum()) if self.split_off else sum(source.rows_read for source in self.stored.sources)


class LimitedSplit:
    """One split under a max_length: its rows as masks, and its sequences."""

    def __init__(self, unlimited: DataSplit, max_length: int | None, excess_length: str) -> None:
        self.unlimited = unlimited
        self._limit = _NO_LIMIT if max_length is None else max_length
        stored = self.stored = unlimited.stored
        # row masks
        without_sequences = unlimited.row_mask & (stored.sequence_counts == 0)
        over_limit = unlimited.row_mask & (stored.longest > self._limit)
        truncates, in_chunks = excess_length == "truncate", excess_length == "chunk"
        self._equal_when_cut = self._pairs_equal_when_cut(over_limit & (truncates and stored.are_pairs))
        starts_after_limit = stored.by_row(np.logical_or, stored.first_trained >= self._limit)
        answer_cut_off = (over_limit & starts_after_limit & truncates) | self._equal_when_cut
        self.chunked = over_limit & ~(stored.has("conversation") | stored.has("pair")) & in_chunks
        self.too_long = over_limit & ~answer_cut_off & ~self.chunked
        self.truncated = self.too_long & truncates
        self.used = unlimited.row_mask & ~without_sequences & ~answer_cut_off & (~self.too_long | self.truncated)
        self.refused = [] if unlimited.split_off else [row for source in stored.sources for row in source.refused]
        self.refused += map(stored.refusal, np.flatnonzero(without_sequences).tolist())
        self.refused += map(self._cut_refusal, np.flatnonzero(answer_cut_off).tolist())
        self.sequence_mask = np.repeat(self.used, stored.sequence_counts)
        self._is_cut = stored.lengths > self._limit
        self._ends = stored.lengths if in_chunks else np.minimum(stored.lengths, self._limit)  # of each sequence
        self._chunk_counts = -(-self._ends // self._limit)
        self._sequence_lengths = _chunk_lengths(self._ends[self.sequence_mask], self._chunk_counts[self.sequence_mask])

    @cached_property
    def lengths(self) -> np.ndarray:
        """Return the tokens of each training row; of a pair, with the longer answer."""
        lengths = self._sequence_lengths
        return lengths.reshape(-1, 2).max(axis=1) if self.stored.are_pairs else lengths

    def longest_mismatched(self) -> int:
        """Return the tokens of the longest prompt plus the longest answer, which KTO may combine."""
        prompt_lengths = self.stored.first_trained[self.sequence_mask]  # a prompt is all before the first trained token
        answer_lengths = self.stored.lengths[self.sequence_mask] - prompt_lengths
        return int(prompt_lengths.max(initial=0) + answer_lengths.max(initial=0))

    def largest_pictures(self, processor: PictureProcessor) -> Sizes:
        """Return the image sizes of the row with most pixel values."""
        stored_sizes = self.stored.picture_sizes
        sizes = stored_sizes[self.used[stored_sizes[:, 0]]]
        value_counts = processor.values_by_row(sizes, len(self.stored))
        if not value_counts.any():
            return ()
        rows_sizes = sizes[sizes[:, 0] == value_counts.argmax(), 1:].tolist()
        return tuple(processor.size(width, height) for width, height in rows_sizes)

    @property
    def total_tokens(self) -> int:
        return int(self._sequence_lengths.sum(dtype=np.int64))

    @property
    def trained_tokens(self) -> int:
        return int(self._trained_sequence_lengths.sum(dtype=np.int64))

    @cached_property
    def trained_lengths(self) -> np.ndarray:
        """Return the trained tokens of each row; of a pair, the mean."""
        lengths = self._trained_sequence_lengths
        return -(-lengths.reshape(-1, 2).sum(axis=1) // 2) if self.stored.are_pairs else lengths  # rounded up

    @cached_property
    def _trained_sequence_lengths(self) -> np.ndarray:
        if not self._is_cut[self.sequence_mask].any():
            return self.stored.trained_counts[self.sequence_mask].astype(np.int64)
        labels = self._cut(self.sequence_mask)["labels"].combine_chunks()
        return np.add.reduceat(labels.flatten().to_numpy() != NOT_TRAINED, labels.offsets.to_numpy()[:-1], dtype=np.int64)

    @property
    def examples(self) -> list[Example]:
        return [self.stored.example(int(row)) for row in np.flatnonzero(self.used)]

    def longest_rows(self) -> list[tuple[tuple[str, int], int]]:
        """Return ((file, row), tokens) of the five longest rows over max_length."""
        rows = np.flatnonzero(self.too_long)
        ordered = rows[np.argsort(-self.stored.longest[rows], kind="stable")][:5]
        return [(self.stored.row_location(index), int(self.stored.longest[index])) for index in ordered]

    def dataset(self, fingerprint: str) -> Dataset:
        from datasets import Dataset
        from datasets.table import InMemoryTable

        return Dataset(InMemoryTable(self.table()), fingerprint=fingerprint)

    def table(self, first_rows: int | None = None) -> pa.Table:
        """Return input_ids and labels of all rows, or of at least the first ones, with rejected_ columns for pairs."""
        mask = self.sequence_mask
        if first_rows is not None:
            mask = mask & (np.cumsum(mask) <= first_rows * (2 if self.stored.are_pairs else 1))
        if self._is_cut[mask].any():
            table = self._cut(mask)
        else:  # stored rows stay mapped from their file; a selection takes 8 bytes of memory a token
            table = self.stored.sequences if mask.all() else self.stored.sequences.filter(mask)
        return _as_pairs(table) if self.stored.are_pairs else table

    def _cut(self, mask: np.ndarray) -> pa.Table:
        selected = self.stored.sequences.filter(mask)
        ends, chunk_counts = self._ends[mask], self._chunk_counts[mask]
        offsets = np.append(0, np.cumsum(_chunk_lengths(ends, chunk_counts)))
        if offsets[-1] > np.iinfo(np.int32).max:
            problem = f"the rows have {offsets[-1]:,} tokens; at most {np.iinfo(np.int32).max:,} can be cut"
            raise DataError(problem, "Set dataset.max_rows, or choose  excess_length=drop")
        # when truncating, the longest end is max_length; chunks have all tokens
        sliced = (pc.list_slice(selected[name], 0, int(ends.max())) for name in ("input_ids", "labels"))
        ids, labels = (pc.list_flatten(array).to_numpy().copy() for array in sliced)
        labels[offsets[:-1]] = NOT_TRAINED  # nothing predicts the first token of a chunk
        tokens = [pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), pa.array(array)) for array in (ids, labels)]
        rows = pa.array(np.repeat(np.arange(len(ends)), chunk_counts))
        others = [selected[name].take(rows) for name in selected.column_names[2:]]
        return pa.table([*tokens, *others], names=selected.column_names)

    def _pairs_equal_when_cut(self, over_limit: np.ndarray) -> np.ndarray:
        rows = np.flatnonzero(over_limit & (self.stored.sequence_counts == 2))
        ids = pc.list_flatten(self.stored.table["input_ids"])
        pairs = ((ids[start].values, ids[start + 1].values) for start in self.stored.sequence_starts[rows].tolist())
        mask = np.zeros(len(self.stored), dtype=bool)
        mask[rows] = [chosen[: self._limit].equals(rejected[: self._limit]) for chosen, rejected in pairs]
        return mask

    def _cut_refusal(self, index: int) -> Refused:
        if self._equal_when_cut[index]:
            reason = f"and rejected are cut to the same {self._limit:,} tokens; there is nothing to prefer"
            return Refused(*self.stored.row_location(index), "chosen", reason)
        bounds = self.stored.sequence_starts
        starts = self.stored.first_trained[bounds[index] : bounds[index + 1]]
        answer_start = int(starts[starts >= self._limit][0])
        reason = f"no trained token is left after truncation; max_length is {self._limit:,}"
        return Refused(*self.stored.row_location(index), None, f"{reason}: the answer begins at token {answer_start + 1:,}")


def _as_pairs(sequences: pa.Table) -> pa.Table:
    # a pair's chosen sequence is followed by its rejected one
    chosen, rejected = (sequences.take(pa.array(range(first, sequences.num_rows, 2), pa.int64())) for first in (0, 1))
    names = [*sequences.column_names, *(f"rejected_{name}" for name in sequences.column_names)]
    return pa.table([*chosen.columns, *rejected.columns], names=names)


def _chunk_lengths(lengths: np.ndarray, counts: np.ndarray) -> np.ndarray:
    # chunks are as equal as possible: the first ones of a sequence have one more token
    chunk_index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(lengths // counts, counts) + (chunk_index < np.repeat(lengths % counts, counts))


def pack(dataset: Dataset, max_length: int, seed: int) -> Dataset:
    """Pack rows best-fit into sequences of at most `max_length` tokens. Raise DataError or FinetuneError."""
    from trl import pack_dataset

    before = _lengths(dataset)
    if (longest := before.max(initial=0)) > max_length:  # TRL would truncate the row silently
        raise DataError(
            f"a row has {longest:,} tokens, more than a packed sequence (max_length {max_length:,})",
            "Raise max_length, or choose  excess_length=drop  or  excess_length=truncate",
        )
    # TRL packs a thousand rows at a time, so they are shuffled first
    packed = pack_dataset(dataset.select_columns(["input_ids", "labels"]).shuffle(seed=seed), max_length, "bfd")
    after = _lengths(packed)
    if after.sum() != before.sum() or after.max(initial=0) > max_length:
        counts = f"{before.sum():,} tokens before, {after.sum():,} after; longest {after.max(initial=0):,} of {max_length:,}"
        raise FinetuneError(f"packing changed the data: {counts}")
    return packed


def _lengths(dataset: Dataset) -> np.ndarray:
    return pc.list_value_length(dataset.with_format("arrow")[:]["input_ids"]).to_numpy()
