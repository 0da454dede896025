"""Random recipes at the edge of their GPU: does a verdict of "fits" ever end out of memory? On stand-in GPUs.

    .venv-card-*/bin/python -m benchmarks.card_edge [--recipes 300] [--seed 0] [--again]

A recipe gets a random model of few layers, format, technique, rank, micro-batch, lengths and share of trained tokens, and a
memory budget: of ten recipes seven within 1 % above the upper end of the forecast ("fits", just so), two between the ends, and
one within 3 % below the lower end ("does not fit"). Its run loads, trains four steps, evaluates and saves within that budget.
Results go to benchmarks/reference/card_edge.csv, a line for each recipe. Recipes in it are left out without --again.
Runs are forks of this process, which has imported everything and opened no GPU.
"""

from __future__ import annotations

import argparse
import copy
import csv
import json
import os
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.card_cells import FORMATS, TECHNIQUES, USUAL
from benchmarks.card_matrix import on_machine, restart_with_libraries, with_own_caches
from finetune.errors import FINISHED, OutOfMemory
from standin_gpu.machine import Machine, describe, read_catalogue
from standin_gpu.sparse_model import write_sparse_model

GIB = 1 << 30
if TYPE_CHECKING:
    from finetune.memory.forecast import Forecast

    BudgetOf = Callable[[Forecast], float]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "reference" / "card_edge.csv"
COLUMNS = (
    "seed", "model", "base_format", "technique", "lora_r", "micro_batch", "rows", "segments", "low_bytes", "high_bytes",
    "budget_bytes", "verdict", "outcome", "seconds",
)  # fmt: skip
#: Without what needs an untied head, and layers in host memory, which need more than a few layers.
MODELS = ("Qwen/Qwen2.5-1.5B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-4B", "google/gemma-3-4b-it")
LEFT_OUT = ("embeddings in host memory", "layers in host memory")
GPU = "rtx-4090"
CATALOGUE = read_catalogue(ROOT / "finetune" / "card" / "cards.json")
#: Shares of the recipes with a budget above the forecast, and with one above or between its ends.
ABOVE, BETWEEN = 0.7, 0.9
#: Tokens of the rows: shorter ones are cut, and may have no answer left to train on.
LONGEST_ROW = 1024


@dataclass(frozen=True)
class EdgeRecipe:
    """A random recipe; its budget is at `budget_position` (0 to 1) among those above, between and below the forecast's ends."""

    seed: int
    model: str
    layers: int
    base_format: str
    technique: str
    rows: str
    expandable: bool
    budget_position: float
    settings: dict[str, Any]

    def budget_bytes(self, forecast: Forecast) -> float:
        """The budget for this forecast."""
        lower, upper = forecast.peak_low_bytes, forecast.peak_high_bytes
        if self.budget_position < ABOVE:
            return upper * (1 + 0.01 * self.budget_position / ABOVE) + GIB / 100
        if self.budget_position < BETWEEN:
            return lower + (upper - lower) * (self.budget_position - ABOVE) / (BETWEEN - ABOVE)
        return lower * (1 - 0.03 * (self.budget_position - BETWEEN) / (1 - BETWEEN))


def random_recipe(seed: int) -> EdgeRecipe:
    """The recipe of this seed."""
    rng = random.Random(seed)
    base_format = rng.choice(list(FORMATS))
    technique = rng.choice([name for name in TECHNIQUES if name not in LEFT_OUT])
    max_length = rng.choice([512, 768, 1024])
    settings = {
        **USUAL, "lora_r": rng.choice([8, 16, 64, 256]), "per_device_train_batch_size": rng.choice([1, 2, 4]),
        "effective_batch_size": rng.choice([4, 8]), "max_length": max_length, "max_steps": 4,
        "excess_length": "truncate", "dataset.accept_findings": ["truncated"],
        "train_on_inputs": max_length < LONGEST_ROW or rng.random() < 0.5, **FORMATS[base_format], **TECHNIQUES[technique],
    }  # fmt: skip
    return EdgeRecipe(
        seed, rng.choice(MODELS), rng.randint(2, 6), base_format, technique, rng.choice(["even", "uneven"]), rng.random() < 0.7,
        rng.random(), settings,
    )  # fmt: skip


def main() -> int:
    """Run the recipes that are missing in the results; the exit status is 1 for a false "fits"."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0, help="the first one's")
    parser.add_argument("--again", action="store_true", help="also recipes that are in the results")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    restart_with_libraries("benchmarks.card_edge")
    results = {} if options.again else read_results(options.output)
    with tempfile.TemporaryDirectory(prefix="card_edge_") as folder:
        machine = Machine(Path(sys.prefix) / "standin_libraries", Path(folder), describe([GPU], CATALOGUE))
        with on_machine(machine, wsl=False):
            import_worker()
        for seed in range(options.seed, options.seed + options.recipes):
            if seed in results:
                continue
            results[seed] = run_recipe(random_recipe(seed), machine)
            write_results(options.output, results)
            print(", ".join(str(value) for value in results[seed].values()), flush=True)
    wrong = [line for line in results.values() if line.get("verdict") == "fits" and line["outcome"] == "out of memory"]
    print(f"{len(results)} recipes, {len(wrong)} false fits")
    return 1 if wrong else 0


def import_worker() -> None:
    """What a worker imports, so that its fork need not; torch asks NVML whether there is a GPU, and opens none."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    torch.set_num_threads(1)
    import bitsandbytes  # noqa: F401

    import finetune.run.callbacks
    import finetune.run.training
    import finetune.run.worker  # noqa: F401


def run_recipe(recipe: EdgeRecipe, machine: Machine, budget_of: BudgetOf | None = None) -> dict[str, Any]:
    """Plan the recipe twice, first to learn where its edge is, and run it within the budget of the second plan."""
    began = time.monotonic()
    line: dict[str, Any] = {
        "seed": recipe.seed, "model": f"{recipe.model}, {recipe.layers} layers", "base_format": recipe.base_format,
        "technique": recipe.technique, "lora_r": recipe.settings["lora_r"],
        "micro_batch": recipe.settings["per_device_train_batch_size"], "rows": recipe.rows,
        "segments": "expandable" if recipe.expandable else "segments",
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir=machine.folder) as run_folder, on_machine(machine, wsl=not recipe.expandable):
        planned, output = Path(run_folder) / "planned.json", Path(run_folder) / "output.txt"
        status = in_fork(lambda: _plan(recipe, machine.folder, Path(run_folder), budget_of or recipe.budget_bytes), output)
        if status == 0:
            line |= json.loads(planned.read_text(encoding="utf-8"))
            status = in_fork(lambda: train_run(Path(run_folder) / "run"), output)
        messages = output.read_text(encoding="utf-8").strip()[-200:]
    outcomes = {FINISHED: "finished", OutOfMemory.exit_code: "out of memory"}
    return line | {
        "outcome": outcomes.get(status) or f"exit {status}: {messages}",
        "seconds": round(time.monotonic() - began, 1),
    }


def in_fork(function: Callable[[], int], output: Path) -> int:
    """The function's result as the exit status of a fork, whose output goes to a file."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        with output.open("w", encoding="utf-8") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        status = function()
    except BaseException:  # noqa: BLE001 - a fork must not return into the parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _plan(recipe: EdgeRecipe, folder: Path, run_folder: Path, budget_of: BudgetOf) -> int:
    """Make the run's directory, and planned.json with columns of the results."""
    from finetune.run.prepare import create_run

    with_own_caches(folder)
    model = write_model(recipe, folder)
    first = prepare_recipe(recipe, model, run_folder, folder / f"{recipe.rows}.jsonl").plan.forecast
    budget = f"{budget_of(first) / GIB:.6f}GiB"
    prepared = prepare_recipe(recipe, model, run_folder, folder / f"{recipe.rows}.jsonl", budget)
    plan = prepared.plan
    create_run(prepared)
    line = {
        "low_bytes": plan.forecast.peak_low_bytes, "high_bytes": plan.forecast.peak_high_bytes,
        "budget_bytes": plan.budget_bytes, "verdict": plan.verdict.value,
    }  # fmt: skip
    (run_folder / "planned.json").write_text(json.dumps(line), encoding="utf-8")
    return 0


def write_model(recipe: EdgeRecipe, folder: Path) -> str:
    """The path of the recipe's model of few layers, in sparse files."""
    from finetune.model.catalogue import catalogue

    model = folder / f"{recipe.model.replace('/', '--')}-{recipe.layers}"
    if not model.exists():
        values = copy.deepcopy(catalogue()[recipe.model])
        text = values.get("text_config", values)
        text["num_hidden_layers"] = recipe.layers
        if "layer_types" in text:
            text["layer_types"] = text["layer_types"][: recipe.layers]
        write_sparse_model(model, values, ROOT / "finetune" / "bundled" / "tiny-base")
    return str(model)


def prepare_recipe(recipe: EdgeRecipe, model: str, run_folder: Path, rows: Path, budget: str = "auto") -> Any:
    """The recipe planned for this machine, with its run in `run_folder`, also where it does not fit."""
    from finetune.recipe.load import load_recipe
    from finetune.run.prepare import prepare

    source = run_folder / "recipe.yaml"
    source.write_text(f"model_name_or_path: {model}\ndataset: {{path: {rows}}}\n", encoding="utf-8")
    values = {**recipe.settings, "memory_budget": budget, "output_dir": str(run_folder / "run")}
    return prepare(load_recipe(str(source), [f"{name}={json.dumps(value)}" for name, value in values.items()]), force=True)


def train_run(run: Path) -> int:
    """The exit status of the run's worker in this process."""
    import torch

    from finetune.planner.plan import read_plan
    from finetune.run.card import cards_of
    from finetune.run.supervise import worker_environment
    from finetune.run.worker import main as work

    plan = read_plan(run / "plan.json")
    environment = worker_environment(cards_of(plan))
    os.environ.clear()
    os.environ.update(environment)
    torch.cuda._is_in_bad_fork = lambda: False  # type: ignore[attr-defined] # the parent counted GPUs, and opened none
    if settings := environment.get("PYTORCH_ALLOC_CONF"):  # torch read its variable when the parent imported it
        torch._C._accelerator_setAllocatorSettings(settings)
    sys.argv = ["worker", str(run)]
    return work()


def read_results(path: Path) -> dict[int, dict[str, Any]]:
    """Lines of earlier results by seed."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {int(line["seed"]): line for line in csv.DictReader(file)}


def write_results(path: Path, results: dict[int, dict[str, Any]]) -> None:
    """All lines by seed."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(results[seed] for seed in sorted(results))


if __name__ == "__main__":
    sys.exit(main())
