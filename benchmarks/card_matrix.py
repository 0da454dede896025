"""Forecast memory beside the memory that torch allocates, for many runs on stand-in GPUs (standin_gpu/README.md).

    make setup-card
    .venv-card-*/bin/python -m benchmarks.card_matrix [--only TEXT ...] [--again | --forecast] [--seconds N]

A cell is a whole run: the recipe is planned for the GPU, and the training process loads, trains three steps, evaluates and
saves there. Weights are zeros that take no space on disk. Results go to benchmarks/reference/card_matrix.csv, a line per phase;
finished cells are skipped without --again. --forecast plans the cells in the results again and keeps their measurements. No
kernel runs, so nothing here measures speed or numbers.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import card_runs
from benchmarks.card_cells import Cell, all_cells, compiled_cells
from benchmarks.card_runs import Lines
from benchmarks.tables import REFERENCE, read_table

KEY = ("model", "gpu", "base_format", "technique", "rows", "segments")
COLUMNS = (
    *KEY, "phase", "forecast_allocated_bytes", "measured_allocated_bytes", "forecast_reserved_bytes", "measured_reserved_bytes",
    "low_bytes", "high_bytes", "measured_gpu_bytes", "verdict", "exit_code", "torch", "measured_on", "graphs", "graph_breaks",
    "compile_s", "problem",
)  # fmt: skip


def main() -> int:
    """Run the selected cells; returns 1 if one failed."""
    parser = card_runs.parser_of(__doc__, "card_matrix.csv")
    parser.add_argument("--forecast", action="store_true", help="plan the cells in the results again; measure nothing")
    parser.add_argument("--compiled", action="store_true", help="run compiled layers, for compiled_matrix.csv")
    options = parser.parse_args()
    cells = {cell.name: cell for cell in (compiled_cells() if options.compiled else all_cells())}
    if options.compiled and options.output == parser.get_default("output"):
        options.output = REFERENCE / "compiled_matrix.csv"
    card_runs.restart_with_libraries("benchmarks.card_matrix")
    measured: dict[str, Lines] = {}
    if options.forecast:
        for line in read_table(options.output):
            measured.setdefault(name_of(line), []).append(line)
        cells = {name: cell for name, cell in cells.items() if name in measured and not cell.planned}
        options.again = True
    with tempfile.TemporaryDirectory(prefix="card_matrix_") as folder:
        cases = {name: functools.partial(run_cell, cell, Path(folder), measured.get(name)) for name, cell in cells.items()}
        new = card_runs.run_missing(cases, options, COLUMNS, name_of, errors_of)
    return int(any(line.get("problem") for lines in new.values() for line in lines))


def name_of(line: Mapping[str, Any]) -> str:
    """The name of a line's cell."""
    return " | ".join(line[column] for column in KEY)


def errors_of(line: Mapping[str, Any]) -> str:
    """Return the phase with the errors of allocated and reserved bytes, or the problem."""
    sizes = [[line.get(f"{who}_{kind}_bytes") for who in ("measured", "forecast")] for kind in ("allocated", "reserved")]
    errors = [f"{int(measured) / int(forecast) - 1:+.3%}" if measured and forecast else "-" for measured, forecast in sizes]
    return line.get("problem") or f"{line['phase']} {' / '.join(errors)}"


def run_cell(cell: Cell, folder: Path, measured: Lines | None = None) -> Lines:
    """Return the cell's lines; earlier `measured` lines only get a new forecast."""
    try:
        with card_runs.created(cell, folder) as (plan, run):
            if measured is not None:
                return [{**line, **_forecast_of(plan, line["phase"]), "problem": ""} for line in measured]
            worker = card_runs.train(plan, run)
            problem = f"exit {worker.returncode}: {worker.stderr.strip()[-300:]}" if worker.returncode else ""
            return [{**line, "exit_code": worker.returncode, "problem": problem} for line in lines_of(cell, plan, run)]
    except Exception as error:  # noqa: BLE001 - the other cells go on
        problem = f"{type(error).__name__}: {error}"
        return [{**line, "problem": problem} for line in measured or [{**cell.columns, "phase": "none"}]]


def lines_of(cell: Cell, plan: Any, run: Any) -> Lines:
    """Return a line for each finished phase, from the run's events."""
    from importlib.metadata import version

    from finetune.events import Compiled, Phase, Step, read_events

    measured: dict[str, list[Any]] = {}
    compiled = Compiled()
    for event in read_events(run.events):
        compiled = event if isinstance(event, Compiled) else compiled
        if isinstance(event, Phase | Step):
            phase = "train" if isinstance(event, Step) else "eval" if event.phase == "evaluate" else event.phase
            measured.setdefault(phase, []).append(event)
    usual = {
        **cell.columns, "torch": version("torch"), "measured_on": "stand-in", "graphs": compiled.graphs,
        "graph_breaks": compiled.graph_breaks, "compile_s": compiled.compile_s,
    }  # fmt: skip
    lines = []
    for phase, events in measured.items():
        reserved_bytes = max(event.peak_reserved_bytes for event in events)
        lines.append({
            **usual, "phase": phase, **_forecast_of(plan, phase), "measured_reserved_bytes": reserved_bytes,
            "measured_allocated_bytes": max(event.peak_allocated_bytes for event in events),
            "measured_gpu_bytes": plan.card.context_bytes + reserved_bytes,
        })  # fmt: skip
    return lines or [{**usual, "phase": "none", **_forecast_of(plan, "none")}]


def _forecast_of(plan: Any, phase: str) -> dict[str, Any]:
    forecast = plan.forecast
    return {
        "verdict": plan.verdict.value, "low_bytes": forecast.peak_low_bytes, "high_bytes": forecast.peak_high_bytes,
        "forecast_allocated_bytes": forecast.peaks.get(phase), "forecast_reserved_bytes": forecast.reserved_peaks.get(phase),
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
