"""How many pictures a split has, and how large they are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from finetune.data.pictures.columns import PictureSizes


@dataclass(frozen=True)
class PictureSummary:
    """Pictures of the rows used. Sizes are (width, height) in pixels, ordered by their area."""

    pictures: int
    rows: int  # with at least one
    most_in_a_row: int
    smallest: tuple[int, int]
    median: tuple[int, int]
    largest: tuple[int, int]
    megapixels: float  # of all together

    def lines(self) -> list[tuple[str, str]]:
        """Labels and values, for a table."""
        most = f", at most {self.most_in_a_row} in one" if self.most_in_a_row > 1 else ""
        sizes = (("smallest", self.smallest), ("median", self.median), ("largest", self.largest))
        return [
            ("pictures", f"{self.pictures:,} in {self.rows:,} row(s){most}"),
            *((f"picture, {name}", _size(*size)) for name, size in sizes),
            ("pictures together", f"{self.megapixels:,.1f} megapixels"),
        ]


def summarise_pictures(sizes: PictureSizes, row_mask: np.ndarray) -> PictureSummary | None:
    """Those of the rows in a mask; None without any."""
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


def _size(width: int, height: int) -> str:
    return f"{width:,} x {height:,}, {width * height / 1e6:.2f} megapixels"
