"""The documentation's tables from the results file, as one JSON object: `python -m benchmarks.gpu.report [RESULTS.jsonl]`.

Only results on a GPU count, and only the newest of a cell. A cell without a result is "not measured".
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import CELLS, Cell

RESULTS = Path(__file__).resolve().parents[1] / "reference" / "gpu_results.jsonl"
GIB = 2**30
NONE = "not measured"
COLUMNS = (
    "run", "forecast, GiB", "measured, GiB", "error", "reserved, GiB", "card: forecast, GiB", "card, GiB", "tokens/s", "MFU",
    "ended",
)  # fmt: skip


def table(lines: list[dict[str, Any]]) -> list[list[str]]:
    """The columns of each cell, by card; one nameless card without results."""
    cards = sorted({line["card"] for line in lines if line["card"]}) or [None]
    rows = []
    for card in cards:
        newest = {line["cell"]: line for line in lines if line["card"] == card} if card else {}
        rows += [_row(cell, newest.get(cell.name), card if len(cards) > 1 else None) for cell in CELLS]
    return rows


def _error(line: dict[str, Any]) -> float | None:
    """Forecast / measured - 1 of the allocated bytes of a run that finished."""
    sizes = [(line.get(name) or {}).get("allocated_bytes") for name in ("forecast", "measured")]
    return sizes[0] / sizes[1] - 1 if all(sizes) and line["state"] == "finished" else None


def _row(cell: Cell, line: dict[str, Any] | None, card: str | None) -> list[str]:
    what = f"{card}: {cell.what}" if card else cell.what
    if line is None or line["state"] == "skipped":
        reason = f": {line['error']}" if line else ""
        return [what, *["-"] * (len(COLUMNS) - 2), f"{NONE}{reason}"]
    forecast, measured, error = line.get("forecast") or {}, line.get("measured") or {}, _error(line)
    interval = [_gib(forecast.get(name)) for name in ("peak_low_bytes", "peak_high_bytes")]
    as_expected = "" if line.get("as_expected") else ", which it should not"
    return [
        what, _gib(forecast.get("allocated_bytes")), _gib(measured.get("allocated_bytes")),
        "-" if error is None else _percent(error, "+"), _gib(measured.get("reserved_bytes")),
        "-" if "-" in interval else " to ".join(interval), _gib(measured.get("card_bytes")),
        f"{measured['tokens_per_s']:,.0f}" if measured.get("tokens_per_s") else "-",
        _percent(measured["mfu"]) if measured.get("mfu") else "-", f"{line['state']}{as_expected}",
    ]  # fmt: skip


def summary(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Cards, number of runs compared, and mean and worst error of their allocated bytes; None without any."""
    names = {cell.name for cell in CELLS}
    newest = {(line["card"], line["cell"]): _error(line) for line in lines if line["card"] and line["cell"] in names}
    errors = {key: error for key, error in newest.items() if error is not None}
    values = list(errors.values())
    return {
        "cards": sorted({card for card, _ in errors}), "runs": len(values),
        "mean": _percent(sum(map(abs, values)) / len(values)) if values else None,
        "worst": _percent(max(values, key=abs), "+") if values else None,
    }  # fmt: skip


def _gib(size: int | None) -> str:
    return f"{size / GIB:.3f}" if size else "-"


def _percent(value: float, sign: str = "") -> str:
    return f"{value:{sign}.2%}".replace("%", " %")


def main() -> None:
    """Print columns, rows and summary."""
    text = (Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS).read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    print(json.dumps({"columns": COLUMNS, "rows": table(lines), **summary(lines)}))


if __name__ == "__main__":
    main()
