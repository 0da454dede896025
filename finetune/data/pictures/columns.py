"""Store images of rows in a column of an Arrow table, with their sizes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

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


def sizes_of(column: pa.ChunkedArray) -> PictureSizes:
    """Return the sizes of all images in a column of rows."""
    pictures = column.combine_chunks()
    sizes = pictures.flatten()
    counts, widths, heights = (
        np.array(values.to_pylist(), np.int64)
        for values in (pictures.value_lengths(), sizes.field("width"), sizes.field("height"))
    )
    return PictureSizes(np.repeat(np.arange(len(counts)), counts), widths, heights)


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
