"""The pictures of stored rows as a column of an Arrow table, which only tables of rows with pictures have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from finetune.data.pictures.source import PictureSource
from finetune.data.pictures.tensors import source_of, stored

#: The column's name, and that of the field of an Example.
PICTURES = "pictures"
_PICTURE = pa.struct([("path", pa.string()), ("digest", pa.string()), ("width", pa.int32()), ("height", pa.int32())])
LIST_OF_PICTURES = pa.list_(_PICTURE)


@dataclass(frozen=True)
class PictureSizes:
    """Width and height in pixels of the pictures of some rows, and the index of each picture's row."""

    rows: np.ndarray
    widths: np.ndarray
    heights: np.ndarray

    def of_rows(self, row_mask: np.ndarray) -> PictureSizes:
        """The pictures of the rows in a mask."""
        used = row_mask[self.rows]
        return PictureSizes(self.rows[used], self.widths[used], self.heights[used])


def picture_array(rows: Sequence[tuple[PictureSource, ...]]) -> pa.Array:
    """A column with the pictures of each row."""
    return pa.array([list(map(stored, pictures)) for pictures in rows], LIST_OF_PICTURES)


def pictures_of(table: pa.Table, row: int) -> tuple[PictureSource, ...]:
    """The pictures of one row."""
    return tuple(map(source_of, table[PICTURES][row].as_py()))


def pictures_of_sequences(table: pa.Table, counts: np.ndarray) -> pa.Array:
    """The pictures of each sequence, of which row i has `counts[i]`; none for a table without pictures."""
    if PICTURES not in table.column_names:
        return pa.array([[]] * int(counts.sum()), LIST_OF_PICTURES)
    return table[PICTURES].combine_chunks().take(pa.array(np.repeat(np.arange(table.num_rows), counts)))


def sizes_of(tables: Sequence[pa.Table]) -> PictureSizes:
    """The sizes of all pictures in tables of consecutive rows."""
    rows, widths, heights, start = [], [], [], 0
    for table in tables:
        if PICTURES in table.column_names:
            column = table[PICTURES].combine_chunks()
            counts = np.array(column.value_lengths().to_pylist(), np.int64)
            flat = column.flatten()
            rows.append(start + np.repeat(np.arange(len(counts)), counts))
            widths.append(np.array(flat.field("width").to_pylist(), np.int64))
            heights.append(np.array(flat.field("height").to_pylist(), np.int64))
        start += table.num_rows
    empty = np.array([], np.int64)
    return PictureSizes(*(np.concatenate([empty, *arrays]) for arrays in (rows, widths, heights)))
