"""Forecast beside what torch's own allocator took, cell by cell, on stand-in GPUs (standin_gpu/README.md).

    make setup-card
    .venv-card-*/bin/python -m benchmarks.card_matrix [--only TEXT ...] [--again | --forecast] [--seconds N]

A cell is a whole run: the recipe is planned for the GPU, and the training process loads, trains three steps, evaluates and
saves there. Weights are zeros that take no space on the disk. Results go to benchmarks/reference/card_matrix.csv, a line for
each phase; cells that are there are left out without --again. --forecast plans the cells in the results again, and keeps what
was measured. No kernel runs: nothing here measures speed or numbers.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.card_cells import Cell, all_cells, compiled_cells, write_rows
from standin_gpu.machine import Machine, describe, read_catalogue
from standin_gpu.sparse_model import write_sparse_model, write_to_hub_cache

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "reference" / "card_matrix.csv"
COMPILED = RESULTS.with_name("compiled_matrix.csv")
COLUMNS = (
    "model", "gpu", "base_format", "technique", "rows", "segments", "phase", "forecast_allocated_bytes",
    "measured_allocated_bytes", "forecast_reserved_bytes", "measured_reserved_bytes", "low_bytes", "high_bytes",
    "measured_gpu_bytes", "verdict", "exit_code", "torch", "measured_on", "graphs", "graph_breaks", "compile_s", "problem",
)  # fmt: skip
#: A worker with this module in its path believes that it runs under WSL, where torch has no expandable segments.
AS_ON_WSL = "import platform\nplatform.release = lambda: '5.15.167.4-microsoft-standard-WSL2'\n"


def main() -> int:
    """Run the cells that are asked for; the exit status says whether all of them ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="texts that all must be in a cell's name")
    parser.add_argument("--again", action="store_true", help="also cells that are in the results")
    parser.add_argument("--forecast", action="store_true", help="only forecast again what is in the results")
    parser.add_argument("--compiled", action="store_true", help="the cells of compiled layers, into compiled_matrix.csv")
    parser.add_argument("--list", action="store_true", help="only print the cells' names")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell after so many")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    options.output = options.output or (COMPILED if options.compiled else RESULTS)
    results = read_results(options.output)
    cells = [
        cell
        for cell in (compiled_cells() if options.compiled else all_cells())
        if all(text in cell.name for text in options.only)
    ]
    if options.list:
        print(*(cell.name for cell in cells), sep="\n")
        return 0
    restart_with_libraries("benchmarks.card_matrix")
    began, failed = time.monotonic(), 0
    with tempfile.TemporaryDirectory(prefix="card_matrix_") as folder:
        with_own_caches(Path(folder))
        for cell in cells:
            measured = results.get(cell.name)
            if (cell.planned or not measured) if options.forecast else (measured and not options.again):
                continue
            if time.monotonic() - began > options.seconds:
                break
            start = time.monotonic()
            lines, problem = run_cell(cell, Path(folder), measured if options.forecast else None)
            failed += bool(problem)
            results[cell.name] = lines
            write_results(options.output, results)
            print(f"{cell.name}: {problem or summary(lines)} ({time.monotonic() - start:.0f} s)", flush=True)
    return 1 if failed else 0


def restart_with_libraries(module: str) -> None:
    """Start `module` again with the stand-in libraries: the loader reads LD_LIBRARY_PATH when a process starts."""
    libraries = Path(sys.prefix) / "standin_libraries"
    if not libraries.is_dir():
        sys.exit("No stand-in libraries in this environment: make setup-card, then use .venv-card-*/bin/python.")
    if str(libraries) not in os.environ.get("LD_LIBRARY_PATH", ""):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries), "PYTHONPATH": str(ROOT)}
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], environment)


def with_own_caches(folder: Path) -> None:
    """Caches of this benchmark's own; this process plans and must not open a GPU."""
    from finetune.card.visible import hide_gpus

    hide_gpus()
    os.environ |= {"HF_HOME": str(folder / "hub_home"), "HF_HUB_OFFLINE": "1", "FINETUNE_CACHE": str(folder / "cache")}
    for kind in ("even", "uneven", "pairs"):
        write_rows(folder / f"{kind}.jsonl", kind)


def run_cell(cell: Cell, folder: Path, measured: list[dict[str, Any]] | None = None) -> tuple[list[dict[str, Any]], str]:
    """(lines of the results, what went wrong or ""). With the lines `measured` earlier only their forecast is new."""
    from finetune.model.catalogue import catalogue

    values, tokenizer = dict(catalogue()[cell.model]), ROOT / "finetune" / "bundled" / "tiny-base"
    model, hub = cell.model, folder / "hub_home" / "hub"
    if cell.layers:
        model = str(folder / cell.model_name.replace("/", "--").replace(", ", "-").replace(" ", "-"))
        if not Path(model).exists():
            fewer = {"num_hidden_layers": cell.layers}
            fewer = {"text_config": values["text_config"] | fewer} if "text_config" in values else fewer
            write_sparse_model(Path(model), values | fewer, tokenizer)
    elif not (hub / f"models--{cell.model.replace('/', '--')}").exists():
        write_to_hub_cache(hub, cell.model, values, tokenizer)
    with tempfile.TemporaryDirectory(dir=folder) as run_folder:
        gpus = read_catalogue(ROOT / "finetune" / "card" / "cards.json")
        machine = Machine(Path(sys.prefix) / "standin_libraries", Path(run_folder), describe([cell.gpu], gpus))
        with on_machine(machine, wsl=not cell.expandable):
            try:
                return _train(cell, model, Path(run_folder), folder / f"{cell.rows}.jsonl", measured)
            except Exception as error:  # noqa: BLE001 - the other cells go on
                problem = f"{type(error).__name__}: {error}"
                return measured or [{**named(cell), "phase": "none", "problem": problem}], problem


@contextmanager
def on_machine(machine: Machine, *, wsl: bool) -> Iterator[None]:
    """This process plans for the machine; `wsl`: as under WSL, and so does the worker."""
    import platform

    before, release = dict(os.environ), platform.release
    paths = [str(ROOT)]
    if wsl:
        (machine.folder / "sitecustomize.py").write_text(AS_ON_WSL, encoding="utf-8")
        platform.release = lambda: "5.15.167.4-microsoft-standard-WSL2"
        paths.insert(0, str(machine.folder))
    changed = {name: machine.environment[name] for name in ("STAND_IN_MACHINE", "STAND_IN_USAGE", "LD_LIBRARY_PATH")}
    os.environ |= {**changed, "TRITON_LIBCUDA_PATH": machine.environment["TRITON_LIBCUDA_PATH"], "PYTHONPATH": ":".join(paths)}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
        platform.release = release


def _train(
    cell: Cell, model: str, run_folder: Path, rows: Path, measured: list[dict[str, Any]] | None
) -> tuple[list[dict[str, Any]], str]:
    from finetune.files import cache_dir
    from finetune.recipe.load import load_recipe
    from finetune.run.card import cards_of
    from finetune.run.prepare import create_run, prepare
    from finetune.run.supervise import worker_environment

    (cache_dir() / "history.jsonl").unlink(missing_ok=True)  # else earlier cells' errors widen the bounds
    source = run_folder / "recipe.yaml"
    source.write_text(f"model_name_or_path: {model}\ndataset: {{path: {rows}}}\n", encoding="utf-8")
    recipe = load_recipe(str(source), cell.overrides(rows, run_folder / "run"))
    prepared = prepare(recipe, force=True)
    plan = prepared.plan
    if measured is not None:
        return [{**line, **_forecast_of(plan), **_forecast_of_phase(plan, line["phase"])} for line in measured], ""
    run = create_run(prepared)
    environment = worker_environment(cards_of(plan))
    environment.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, "-m", "finetune.run.worker", str(run.path)]
    worker = subprocess.run(command, env=environment, capture_output=True, text=True)
    if worker.returncode:
        return lines_of(cell, plan, run, worker.returncode), f"exit {worker.returncode}: {worker.stderr.strip()[-300:]}"
    return lines_of(cell, plan, run, 0), ""


def lines_of(cell: Cell, plan: Any, run: Any, exit_code: int) -> list[dict[str, Any]]:
    """One line for each phase that ended, from the run's own events."""
    from importlib.metadata import version

    from finetune.events import Compiled, Phase, Step, read_events

    measured: dict[str, list[Any]] = {}
    compiled = Compiled()
    for event in read_events(run.events):
        compiled = event if isinstance(event, Compiled) else compiled
        if isinstance(event, Phase):
            measured.setdefault({"evaluate": "eval"}.get(event.phase, event.phase), []).append(event)
        elif isinstance(event, Step):
            measured.setdefault("train", []).append(event)
    usual = {
        **named(cell), "exit_code": exit_code, "torch": version("torch"), "measured_on": "stand-in", **_forecast_of(plan),
        "graphs": compiled.graphs, "graph_breaks": compiled.graph_breaks, "compile_s": compiled.compile_s,
    }  # fmt: skip
    context = plan.card.context_bytes
    return [
        {
            **usual, "phase": phase, **_forecast_of_phase(plan, phase),
            "measured_allocated_bytes": max(event.peak_allocated_bytes for event in events),
            "measured_reserved_bytes": max(event.peak_reserved_bytes for event in events),
            "measured_gpu_bytes": context + max(event.peak_reserved_bytes for event in events),
        }
        for phase, events in measured.items()
    ] or [{**usual, "phase": "none"}]  # fmt: skip


def named(cell: Cell) -> dict[str, Any]:
    """The columns that name a cell."""
    return {
        "model": cell.model_name, "gpu": cell.gpu, "base_format": cell.base_format, "technique": cell.technique,
        "rows": cell.rows, "segments": "expandable" if cell.expandable else "segments",
    }  # fmt: skip


def _forecast_of(plan: Any) -> dict[str, Any]:
    return {
        "verdict": plan.verdict.value, "low_bytes": plan.forecast.peak_low_bytes, "high_bytes": plan.forecast.peak_high_bytes,
    }  # fmt: skip


def _forecast_of_phase(plan: Any, phase: str) -> dict[str, Any]:
    return {
        "forecast_allocated_bytes": plan.forecast.peaks.get(phase),
        "forecast_reserved_bytes": plan.forecast.reserved_peaks.get(phase),
    }


def error_of(line: dict[str, Any], kind: str) -> float | None:
    """measured / forecast - 1 of `allocated` or `reserved` bytes; None where one of them is unknown."""
    forecast, measured = (line.get(f"{who}_{kind}_bytes") for who in ("forecast", "measured"))
    return int(measured) / int(forecast) - 1 if forecast and measured else None


def summary(lines: list[dict[str, Any]]) -> str:
    """Errors of each phase in a line."""
    texts = []
    for line in lines:
        errors = [error_of(line, kind) for kind in ("allocated", "reserved")]
        shown = ["-" if error is None else f"{error:+.3%}" for error in errors]
        texts.append(f"{line['phase']} {shown[0]} / {shown[1]}")
    return ", ".join(texts)


def read_results(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Lines of earlier results by the cell's name."""
    results: dict[str, list[dict[str, Any]]] = {}
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            for line in csv.DictReader(file):
                name = " | ".join(line[column] for column in ("model", "gpu", "base_format", "technique", "rows", "segments"))
                results.setdefault(name, []).append(line)
    return results


def write_results(path: Path, results: dict[str, list[dict[str, Any]]]) -> None:
    """All lines in the cells' order."""
    names = [cell.name for cell in all_cells()]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for name in sorted(results, key=lambda name: names.index(name) if name in names else len(names)):
            writer.writerows(results[name])


if __name__ == "__main__":
    sys.exit(main())
