"""The last bytes of a GPU, on stand-in GPUs: within which budgets a run ends, and how retries end a run on a smaller GPU.

    .venv-card-*/bin/python -m benchmarks.card_end [--only TEXT] [--steps 2] [--again]

"upper end", "likely peak", "lower end": the budget is that of the forecast, in steps of 2 MiB around it. At the first two a run
must finish, at the third it must be out of memory. "smaller by 20 %": the run is planned for the whole GPU, which then has 20 %
less than the forecast's peak; the supervisor's retries must finish it. Results go to benchmarks/reference/card_end.csv.
"""

from __future__ import annotations

import argparse
import csv
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.card_cells import FORMATS, USUAL
from benchmarks.card_edge import (
    CATALOGUE,
    GIB,
    GPU,
    ROOT,
    EdgeRecipe,
    import_worker,
    in_fork,
    prepare_recipe,
    run_recipe,
    write_model,
)  # fmt: skip
from benchmarks.card_matrix import on_machine, restart_with_libraries, with_own_caches
from standin_gpu.machine import Machine, describe

if TYPE_CHECKING:
    from finetune.memory.forecast import Forecast

RESULTS = ROOT / "benchmarks" / "reference" / "card_end.csv"
COLUMNS = ("case", "base_format", "gpu_bytes", "verdict", "outcome", "changes", "seconds")
MIB = 1 << 20
MODEL, LAYERS = "Qwen/Qwen3-8B", 4
ENDS = {"upper end": "peak_high_bytes", "likely peak": "peak_bytes", "lower end": "peak_low_bytes"}
#: Shares of the forecast's peak that a GPU lacks.
LACKING = (0.01, 0.05, 0.2, 0.5)


def recipe_of(base_format: str, **settings: Any) -> EdgeRecipe:
    """A run of four layers of an 8B model, all of whose settings are the recipe's but those of None."""
    values = {**USUAL, "max_steps": 4, "effective_batch_size": 8, **FORMATS[base_format], **settings}
    values = {name: value for name, value in values.items() if value is not None}
    return EdgeRecipe(0, MODEL, LAYERS, base_format, "nothing recomputed", "uneven", True, 0.0, values)


def budget_at(forecast: Forecast, end: str, offset_bytes: int) -> float:
    """So many bytes beside an end of the forecast."""
    return getattr(forecast, ENDS[end]) + offset_bytes


def run_within(base_format: str, end: str, offset_mib: int, machine: Machine) -> dict[str, Any]:
    """A run whose budget is so many MiB beside an end of its forecast."""
    budget_of = functools.partial(budget_at, end=end, offset_bytes=offset_mib * MIB)
    line = run_recipe(recipe_of(base_format), machine, budget_of)
    return {"gpu_bytes": line.get("budget_bytes"), "verdict": line.get("verdict"), "outcome": line["outcome"], "changes": ""}


def run_on_smaller(base_format: str, lacking: float, machine: Machine) -> dict[str, Any]:
    """A run that was planned for the whole GPU, which then lacks a share of the forecast's peak."""
    # the planner's to choose, so that retries may change them
    recipe = recipe_of(
        base_format,
        activation_checkpointing=None,
        layer_offloading=None,
        offload_embeddings=None,
        per_device_train_batch_size=8,
    )
    with tempfile.TemporaryDirectory(dir=machine.folder) as folder:
        run, output = Path(folder) / "run", Path(folder) / "output.txt"
        with on_machine(machine, wsl=False):
            status = in_fork(lambda: _create(recipe, machine.folder, Path(folder)), output)
        if status:
            return {"outcome": f"planning ended with {status}: {output.read_text(encoding='utf-8')[-200:]}"}
        forecast = json.loads((run / "plan.json").read_text(encoding="utf-8"))["forecast"]
        total_bytes = (1 - lacking) * forecast["peak_bytes"]
        with on_machine(smaller_machine(Path(folder), total_bytes), wsl=False):
            environment = {**os.environ, "FINETUNE_CACHE": str(Path(folder) / "cache")}  # speeds here are not the user's
            command = [sys.executable, "-m", "finetune.run.supervise", str(run)]
            status = subprocess.run(command, env=environment, check=False).returncode
        changes = [event["changes"] for event in _events(run) if event["kind"] == "retry"]
    outcome = "finished" if status == 0 else f"exit {status}"
    return {"gpu_bytes": round(total_bytes), "outcome": outcome, "changes": json.dumps(changes)}


def smaller_machine(folder: Path, total_bytes: float) -> Machine:
    """A machine whose GPU has so many bytes, described in a folder of its own: the next case is planned for the whole GPU."""
    description = describe([f"{GPU}:total_gib={total_bytes / GIB}"], CATALOGUE)
    return Machine(Path(sys.prefix) / "standin_libraries", folder, description)


def _create(recipe: EdgeRecipe, folder: Path, run_folder: Path) -> int:
    from finetune.run.prepare import create_run

    with_own_caches(folder)
    create_run(prepare_recipe(recipe, write_model(recipe, folder), run_folder, folder / "uneven.jsonl"))
    return 0


def _events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines()]


def all_cases(steps: int) -> dict[str, functools.partial[dict[str, Any]]]:
    """Each case by its name, without its machine."""
    cases = {}
    for base_format in FORMATS:
        for end in ENDS:
            for offset in range(-2 * steps, 2 * steps + 1, 2):
                cases[f"{base_format} | {end} {offset:+d} MiB"] = functools.partial(run_within, base_format, end, offset)
        for lacking in LACKING:
            cases[f"{base_format} | smaller by {lacking:.0%}"] = functools.partial(run_on_smaller, base_format, lacking)
    return cases


def main() -> int:
    """Run the cases that are missing in the results; the exit status is 1 for one that ended otherwise than it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--steps", type=int, default=2, help="of 2 MiB, on both sides of each end")
    parser.add_argument("--again", action="store_true", help="also cases that are in the results")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    restart_with_libraries("benchmarks.card_end")
    results = {} if options.again else read_results(options.output)
    with tempfile.TemporaryDirectory(prefix="card_end_") as folder:
        machine = Machine(Path(sys.prefix) / "standin_libraries", Path(folder), describe([GPU], CATALOGUE))
        with on_machine(machine, wsl=False):
            import_worker()
        for name, run in all_cases(options.steps).items():
            if name in results or options.only not in name:
                continue
            start = time.monotonic()
            base_format, case = name.split(" | ")
            line = {"case": case, "base_format": base_format, **run(machine), "seconds": round(time.monotonic() - start, 1)}
            results[name] = line
            write_results(options.output, results)
            print(", ".join(str(value) for value in line.values()), flush=True)
    wrong = [name for name, line in results.items() if not is_right(line)]
    print(f"{len(results)} cases, {len(wrong)} ended otherwise than they must" + "".join(f"\n  {name}" for name in wrong))
    return 1 if wrong else 0


def is_right(line: dict[str, Any]) -> bool:
    """Whether a case ended as it must: out of memory at the lower end, finished elsewhere."""
    return bool(line["outcome"] == ("out of memory" if line["case"].startswith("lower end") else "finished"))


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Lines of earlier results by name."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {f"{line['base_format']} | {line['case']}": line for line in csv.DictReader(file)}


def write_results(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """All lines."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(results.values())


if __name__ == "__main__":
    sys.exit(main())
