"""Command lines, machines, plans and runs of the benchmarks on stand-in GPUs (standin_gpu/README.md)."""

from __future__ import annotations

import argparse
import copy
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.card_cells import Cell, write_rows
from benchmarks.tables import REFERENCE, read_table, write_table
from standin_gpu.machine import Machine, describe, read_catalogue
from standin_gpu.sparse_model import write_sparse_model

if TYPE_CHECKING:
    from finetune.memory.forecast import Forecast
    from finetune.planner.plan import Plan
    from finetune.run.directory import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = Path(sys.prefix) / "standin_libraries"
CATALOGUE = read_catalogue(ROOT / "finetune" / "card" / "cards.json")
TOKENIZER = ROOT / "finetune" / "bundled" / "tiny-base"
#: The GPU of benchmarks that compare no GPUs.
GPU = "rtx-4090"
#: A worker with this module in its path believes that it runs under WSL, where torch has no expandable segments.
AS_ON_WSL = "import platform\nplatform.release = lambda: '5.15.167.4-microsoft-standard-WSL2'\n"
GIB = 1 << 30

Lines = list[dict[str, Any]]


def parser_of(description: str | None, table: str) -> argparse.ArgumentParser:
    """The options that these benchmarks share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="run cases whose names have all these texts")
    parser.add_argument("--again", action="store_true", help="repeat cases that are in the results")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no case after this time")
    parser.add_argument("--output", type=Path, default=REFERENCE / table)
    return parser


def restart_with_libraries(module: str) -> None:
    """Start `module` again with the stand-in libraries: the loader reads LD_LIBRARY_PATH when a process starts."""
    if not LIBRARIES.is_dir():
        sys.exit("This environment has no stand-in libraries. Run make setup-card, then use .venv-card-*/bin/python.")
    if str(LIBRARIES) not in os.environ.get("LD_LIBRARY_PATH", ""):
        environment = {**os.environ, "LD_LIBRARY_PATH": str(LIBRARIES), "PYTHONPATH": str(ROOT)}
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], environment)


def run_missing(
    cases: Mapping[str, Callable[[], Lines]], options: argparse.Namespace, columns: tuple[str, ...],
    name_of: Callable[[Mapping[str, Any]], str], text_of: Callable[[Mapping[str, Any]], str] | None = None,
) -> dict[str, Lines]:  # fmt: skip
    """Run the cases that are missing in the results and write each case's lines when it ends; returns the new lines by case."""
    results: dict[str, Lines] = {}
    for line in read_table(options.output):
        results.setdefault(name_of(line), []).append(line)
    order, began, new = {name: number for number, name in enumerate(cases)}, time.monotonic(), {}
    for name, run in cases.items():
        if not all(text in name for text in options.only) or (name in results and not options.again):
            continue
        if time.monotonic() - began > options.seconds:
            break
        start = time.monotonic()
        results[name] = new[name] = run()
        seconds = round(time.monotonic() - start, 1)
        for line in new[name] if "seconds" in columns else ():
            line["seconds"] = seconds
        in_order = sorted(results, key=lambda case: order.get(case, len(order)))
        write_table(options.output, (line for case in in_order for line in results[case]), columns)
        print(f"{name}: {', '.join(map(text_of or shown, new[name]))} ({seconds:.0f} s)", flush=True)
    return new


def shown(line: Mapping[str, Any]) -> str:
    """A line for a person."""
    return ", ".join(f"{name} {value}" for name, value in line.items() if value not in ("", None))


def machine_with(gpu: str, folder: Path) -> Machine:
    """A machine with a GPU: a name of the catalogue, perhaps with changed facts."""
    return Machine(LIBRARIES, folder, describe([gpu], CATALOGUE))


@contextmanager
def on_machine(machine: Machine, *, wsl: bool = False) -> Iterator[None]:
    """Plan for the machine in this process. `wsl`: this process and its workers run as under WSL."""
    import platform

    before, release = dict(os.environ), platform.release
    paths = [str(ROOT)]
    if wsl:
        (machine.folder / "sitecustomize.py").write_text(AS_ON_WSL, encoding="utf-8")
        platform.release = lambda: "5.15.167.4-microsoft-standard-WSL2"
        paths.insert(0, str(machine.folder))
    names = ("STAND_IN_MACHINE", "STAND_IN_USAGE", "LD_LIBRARY_PATH", "TRITON_LIBCUDA_PATH")
    os.environ |= {**{name: machine.environment[name] for name in names}, "PYTHONPATH": ":".join(paths)}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before
        platform.release = release


def write_model(name: str, layers: int | None, folder: Path) -> str:
    """Write a model of the catalogue, with its first `layers`, to sparse files; returns its path."""
    from finetune.model.names import catalogue

    model = folder / f"{name.replace('/', '--')}-{layers}"
    if not model.exists():
        values = copy.deepcopy(dict(catalogue()[name]))
        text = values.get("text_config", values)
        if layers:
            text["num_hidden_layers"] = layers
            text |= {"layer_types": text["layer_types"][:layers]} if "layer_types" in text else {}
        write_sparse_model(model, values, TOKENIZER)
    return str(model)


@contextmanager
def created(
    cell: Cell, folder: Path, budget_of: Callable[[Forecast], float] | None = None
) -> Iterator[tuple[Plan, RunDirectory]]:
    """Plan a cell on its GPU, even if it does not fit, and create its run; inside, this process is on that machine.

    `folder` keeps models, rows and caches for other cells. `budget_of`: bytes of a memory budget, from the forecast without it.
    """
    from finetune.card.visible import hide_gpus
    from finetune.files import cache_dir
    from finetune.recipe import load_recipe
    from finetune.run.prepare import create_run, prepare

    hide_gpus()  # a plan must not open a GPU
    machine_folder = tempfile.TemporaryDirectory(dir=folder)
    with machine_folder as path, on_machine(machine_with(cell.gpu, Path(path)), wsl=not cell.expandable):
        os.environ |= {"HF_HOME": str(folder / "hub_home"), "HF_HUB_OFFLINE": "1", "FINETUNE_CACHE": str(folder / "cache")}
        (cache_dir() / "history.jsonl").unlink(missing_ok=True)  # else earlier cells' errors widen the bounds
        rows, recipe = folder / f"{cell.rows}.jsonl", Path(path) / "recipe.yaml"
        write_rows(rows, cell.rows)
        model = write_model(cell.model, cell.layers, folder)
        recipe.write_text(f"model_name_or_path: {model}\ndataset: {{path: {rows}}}\n", encoding="utf-8")
        overrides = cell.recipe(rows, Path(path) / "run")
        prepared = prepare(load_recipe(str(recipe), overrides), force=True)
        if budget_of and prepared.plan.forecast:
            budget = f"memory_budget={budget_of(prepared.plan.forecast) / GIB:.6f}GiB"
            prepared = prepare(load_recipe(str(recipe), [*overrides, budget]), force=True)
        yield prepared.plan, create_run(prepared)


def train(plan: Plan, run: RunDirectory, **variables: str) -> subprocess.CompletedProcess[str]:
    """Train a run by its worker alone, which retries nothing."""
    from finetune.run.card import cards_of
    from finetune.run.supervise import worker_environment

    environment = {**worker_environment(cards_of(plan)), **variables}
    environment.pop("PYTHONSAFEPATH", None)
    command = [sys.executable, "-m", "finetune.run.worker", str(run.path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
