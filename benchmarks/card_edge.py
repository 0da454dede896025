"""Random recipes at the edge of a stand-in GPU: does a run with the verdict "fits" ever run out of memory?

    .venv-card-*/bin/python -m benchmarks.card_edge [--recipes 300] [--seed 0] [--again]

A recipe gets a random model of few layers, format, technique, rank, micro-batch, lengths and share of trained tokens, and a
memory budget: of ten recipes seven within 1 % above the upper end of the forecast ("fits", just so), two between the ends, and
one within 3 % below the lower end ("does not fit"). Its run loads, trains four steps, evaluates and saves within that budget.
Results go to benchmarks/reference/card_edge.csv, a line per recipe; finished recipes are skipped without --again. Runs are
forks of this process, which has imported everything and opened no GPU.
"""

from __future__ import annotations

import functools
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import card_runs
from benchmarks.card_cells import FORMATS, TECHNIQUES, Cell
from benchmarks.card_runs import GPU, Lines
from benchmarks.forks import import_worker, start_fork, wait_for
from benchmarks.tables import read_table
from finetune.errors import FINISHED, OutOfMemory
from standin_gpu.machine import Machine

if TYPE_CHECKING:
    from finetune.memory.forecast import Forecast

    BudgetOf = Callable[[Forecast], float]

GIB = 1 << 30
COLUMNS = (
    "seed", "model", "base_format", "technique", "lora_r", "micro_batch", "rows", "segments", "low_bytes", "high_bytes",
    "budget_bytes", "verdict", "outcome", "seconds",
)  # fmt: skip
#: Without what needs an untied head, and layers in host memory, which need more than a few layers.
MODELS = ("Qwen/Qwen2.5-1.5B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-4B", "google/gemma-3-4b-it")
LEFT_OUT = ("embeddings in host memory", "layers in host memory")
#: Shares of the recipes with a budget above the forecast, and with one above or between its ends.
ABOVE, BETWEEN = 0.7, 0.9
#: Tokens of the rows: shorter ones are cut, and may have no answer left to train on.
LONGEST_ROW = 1024


def random_recipe(seed: int) -> tuple[Cell, float]:
    """Return the recipe of this seed, and its budget's position from 0 (above the forecast) to 1 (below the forecast)."""
    rng = random.Random(seed)
    base_format = rng.choice(list(FORMATS))
    technique = rng.choice([name for name in TECHNIQUES if name not in LEFT_OUT])
    max_length = rng.choice([512, 768, 1024])
    settings = {
        "lora_r": rng.choice([8, 16, 64, 256]), "per_device_train_batch_size": rng.choice([1, 2, 4]),
        "effective_batch_size": rng.choice([4, 8]), "max_length": max_length, "max_steps": 4,
        "excess_length": "truncate", "dataset.accept_findings": ["truncated"],
        "train_on_inputs": max_length < LONGEST_ROW or rng.random() < 0.5, **FORMATS[base_format], **TECHNIQUES[technique],
    }  # fmt: skip
    model, layers, rows, expandable = rng.choice(MODELS), rng.randint(2, 6), rng.choice(["even", "uneven"]), rng.random() < 0.7
    return Cell(model, GPU, base_format, technique, rows, expandable, settings, layers), rng.random()


def budget_beside(forecast: Forecast, position: float) -> float:
    """Return the budget at this position, in bytes."""
    lower, upper = forecast.peak_low_bytes, forecast.peak_high_bytes
    if position < ABOVE:
        return upper * (1 + 0.01 * position / ABOVE) + GIB / 100
    if position < BETWEEN:
        return lower + (upper - lower) * (position - ABOVE) / (BETWEEN - ABOVE)
    return lower * (1 - 0.03 * (position - BETWEEN) / (1 - BETWEEN))


def main() -> int:
    """Run the missing recipes; returns 1 for a false "fits"."""
    parser = card_runs.parser_of(__doc__, "card_edge.csv")
    parser.add_argument("--recipes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="seed of the first recipe")
    options = parser.parse_args()
    card_runs.restart_with_libraries("benchmarks.card_edge")
    with tempfile.TemporaryDirectory(prefix="card_edge_") as folder:
        machine = card_runs.machine_with(GPU, Path(folder))
        with card_runs.on_machine(machine):
            import_worker()
        seeds = range(options.seed, options.seed + options.recipes)
        cases = {str(seed): functools.partial(run_seed, seed, machine) for seed in seeds}
        card_runs.run_missing(cases, options, COLUMNS, lambda line: line["seed"])
    lines = read_table(options.output)
    wrong = [line for line in lines if line["verdict"] == "fits" and line["outcome"] == "out of memory"]
    print(f"{len(lines)} recipes, {len(wrong)} false fits")
    return 1 if wrong else 0


def run_seed(seed: int, machine: Machine) -> Lines:
    """The line of a random recipe."""
    cell, position = random_recipe(seed)
    figures = run_within(cell, machine, functools.partial(budget_beside, position=position))
    settings = {"lora_r": cell.settings["lora_r"], "micro_batch": cell.settings["per_device_train_batch_size"]}
    line = {"seed": seed, **cell.columns, **settings, **figures}
    return [{name: line.get(name, "") for name in COLUMNS}]


def run_within(cell: Cell, machine: Machine, budget_of: BudgetOf) -> dict[str, Any]:
    """Plan the cell twice, first to find its edge, and run it within the budget of the second plan."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=machine.folder) as run_folder, card_runs.on_machine(machine, wsl=not cell.expandable):
        planned, output = Path(run_folder) / "planned.json", Path(run_folder) / "output.txt"
        status = wait_for(start_fork(lambda: _plan(cell, machine.folder, Path(run_folder), budget_of), output))
        if status == 0:
            figures = json.loads(planned.read_text(encoding="utf-8"))
            status = wait_for(start_fork(lambda: card_runs.train_run(Path(run_folder) / "run"), output))
        messages = output.read_text(encoding="utf-8").strip()[-200:]
    outcomes = {FINISHED: "finished", OutOfMemory.exit_code: "out of memory"}
    return {**figures, "outcome": outcomes.get(status) or f"exit {status}: {messages}"}


def _plan(cell: Cell, folder: Path, run_folder: Path, budget_of: BudgetOf) -> int:
    """Make the run's directory, and planned.json with columns of the results."""
    from finetune.run.prepare import create_run

    card_runs.with_own_caches(folder)
    budget_bytes = budget_of(card_runs.prepared_cell(cell, folder, run_folder).plan.forecast)
    prepared = card_runs.prepared_cell(cell, folder, run_folder, memory_budget=f"{budget_bytes / GIB:.6f}GiB")
    create_run(prepared)
    plan = prepared.plan
    figures = {
        "low_bytes": plan.forecast.peak_low_bytes, "high_bytes": plan.forecast.peak_high_bytes,
        "budget_bytes": plan.budget_bytes, "verdict": plan.verdict.value,
    }  # fmt: skip
    (run_folder / "planned.json").write_text(json.dumps(figures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
