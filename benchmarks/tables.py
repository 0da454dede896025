"""The tables of benchmarks/reference: CSV files of results."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).resolve().parent / "reference"


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows; none without a file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_table(path: Path, rows: Iterable[Mapping[str, Any]], columns: Iterable[str] = ()) -> None:
    """Write the rows, with the columns of the first one unless named."""
    rows = list(rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(columns or rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
