"""Random recipes at the edge of a stand-in GPU: does a run with the verdict "fits" ever run out of memory?

    .venv-card-*/bin/python -m benchmarks.card_edge [--recipes 300] [--seed 0] [--again]

A recipe gets a random model of few layers, format, technique, rank, micro-batch, lengths and share of trained tokens, and a
memory budget: of ten recipes seven within 1 % above the upper end of the forecast ("fits", just so), two between the ends, and
one within 3 % below the lower end ("does not fit"). Its run loads, trains four steps, evaluates and saves within that budget.
Results go to benchmarks/reference/card_edge.csv, a line per recipe; finished recipes are skipped without --again.
"""

from __future__ import annotations

import functools
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import card_runs
from benchmarks.card_cells import FORMATS, TECHNIQUES, Cell
from benchmarks.card_runs import GIB, GPU, Lines
from benchmarks.tables import read_table
from finetune.errors import FINISHED, FinetuneError, OutOfMemory

if TYPE_CHECKING:
    from finetune.memory.forecast import Forecast

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
        seeds = range(options.seed, options.seed + options.recipes)
        cases = {str(seed): functools.partial(run_seed, seed, Path(folder)) for seed in seeds}
        card_runs.run_missing(cases, options, COLUMNS, lambda line: line["seed"])
    lines = read_table(options.output)
    wrong = [line for line in lines if line["verdict"] == "fits" and line["outcome"] == "out of memory"]
    print(f"{len(lines)} recipes, {len(wrong)} false fits")
    return 1 if wrong else 0


def run_seed(seed: int, folder: Path) -> Lines:
    """The line of a random recipe."""
    cell, position = random_recipe(seed)
    figures = run_within(cell, folder, functools.partial(budget_beside, position=position))
    settings = {"lora_r": cell.settings["lora_r"], "micro_batch": cell.settings["per_device_train_batch_size"]}
    line = {"seed": seed, **cell.columns, **settings, **figures}
    return [{name: line.get(name, "") for name in COLUMNS}]


def run_within(cell: Cell, folder: Path, budget_of: Callable[[Forecast], float]) -> dict[str, Any]:
    """Run the cell within a budget that its forecast decides; returns columns of the results."""
    try:
        with card_runs.created(cell, folder, budget_of) as (plan, run):
            worker = card_runs.train(plan, run)
    except FinetuneError as error:
        return {"outcome": f"planning ended with {error}"}
    outcomes = {FINISHED: "finished", OutOfMemory.exit_code: "out of memory"}
    return {
        "low_bytes": plan.forecast.peak_low_bytes, "high_bytes": plan.forecast.peak_high_bytes,
        "budget_bytes": plan.budget_bytes, "verdict": plan.verdict.value,
        "outcome": outcomes.get(worker.returncode) or f"exit {worker.returncode}: {worker.stderr.strip()[-200:]}",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
