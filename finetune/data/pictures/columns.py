"""Store images of rows in a column of an Arrow table, with their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from finetune.data.pictures.source import PictureSource
from finetune.data.pictures.tensors import source_of

#: Name of the column, and of the field of an Example.
PICTURES = "pictures"
_PICTURE = pa.struct([("path", pa.string()), ("digest", pa.string()), ("width", pa.int32()), ("height", pa.int32())])
LIST_OF_PICTURES = pa.list_(_PICTURE)


@dataclass(frozen=True)
class PictureSizes:
    """Sizes of images in pixels, and the index of each image's row."""

    rows: np.ndarray
    widths: np.ndarray
    heights: np.ndarray

    def of_rows(self, row_mask: np.ndarray) -> PictureSizes:
        used = row_mask[self.rows]
        return PictureSizes(self.rows[used], self.widths[used], self.heights[used])


def pictures_of(table: pa.Table, row: int) -> tuple[PictureSource, ...]:
    """Return the images of one row."""
    return tuple(map(source_of, table[PICTURES][row].as_py()))


def pictures_of_sequences(table: pa.Table, counts: np.ndarray) -> pa.Array:
    """Return the images of each sequence; row i has `counts[i]` sequences."""
    # only tables of rows with images have the column
    if PICTURES not in table.column_names:
        return pa.array([[]] * int(counts.sum()), LIST_OF_PICTURES)
    return table[PICTURES].combine_chunks().take(pa.array(np.repeat(np.arange(table.num_rows), counts)))


def sizes_of(tables: Sequence[pa.Table]) -> PictureSizes:
    """Return the sizes of all images in tables of consecutive rows."""
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


@dataclass(frozen=True)
class PictureSummary:
    """Images of the rows used; sizes are (width, height) in pixels, ordered by area."""

    pictures: int
    rows: int  # with at least one
    most_in_a_row: int
    smallest: tuple[int, int]
    median: tuple[int, int]
    largest: tuple[int, int]
    megapixels: float  # of all together

    def lines(self) -> list[tuple[str, str]]:
        """Return labels and values for a table."""
        most = f", at most {self.most_in_a_row} in one" if self.most_in_a_row > 1 else ""
        sizes = (("smallest", self.smallest), ("median", self.median), ("largest", self.largest))
        return [
            ("images", f"{self.pictures:,} in {self.rows:,} row(s){most}"),
            *(
                (f"image, {name}", f"{width:,} x {height:,}, {width * height / 1e6:.2f} megapixels")
                for name, (width, height) in sizes
            ),
            ("images together", f"{self.megapixels:,.1f} megapixels"),
        ]


def summarise_pictures(sizes: PictureSizes, row_mask: np.ndarray) -> PictureSummary | None:
    """Summarise the images of some rows; None without images."""
    used = sizes.of_rows(row_mask)
    if not len(used.rows):
        return None
    areas = used.widths * used.heights
    order = np.argsort(areas, kind="stable")
    counts = np.unique(used.rows, return_counts=True)[1]
    smallest, median, largest = (
        (int(used.widths[index]), int(used.heights[index])) for index in order[[0, (len(order) - 1) // 2, -1]]
    )
    megapixels = round(float(areas.sum()) / 1e6, 3)
    return PictureSummary(len(areas), len(counts), int(counts.max()), smallest, median, largest, megapixels)
