"""What one micro-batch asks of a GPU, by technique: kernels, synchronisations and copies, counted on a stand-in GPU.

    .venv-card-*/bin/python -m benchmarks.card_kernels [--only TEXT] [--again]

Runs of 2 and of 4 optimizer steps, with 4 and with 8 layers of an 8B model: the differences are a step's, and a layer's.
Results go to benchmarks/reference/card_kernels.csv; all columns but `layer_kernels` are with 4 layers.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.card_cells import FORMATS, TECHNIQUES, USUAL
from benchmarks.card_edge import CATALOGUE, GPU, ROOT, EdgeRecipe, in_fork, prepare_recipe, write_model
from benchmarks.card_matrix import on_machine, restart_with_libraries, with_own_caches
from standin_gpu.machine import Machine, describe

RESULTS = ROOT / "benchmarks" / "reference" / "card_kernels.csv"
COLUMNS = (
    "technique", "base_format", "kernels", "layer_kernels", "synchronisations", "by_call", "to_gpu_bytes", "from_gpu_bytes",
)  # fmt: skip
MODEL = "Qwen/Qwen3-8B"
STEPS, LAYERS = (2, 4), (4, 8)
#: Micro-batches of a step.
MICRO_BATCHES = 2
MEASURED = ("nothing recomputed", "every layer", "all but attention", "no lean layers", "8-bit Adam")
CASES = {
    f"{base_format} | {technique}": {**FORMATS[base_format], **TECHNIQUES[technique]}
    for base_format in FORMATS
    for technique in MEASURED
    if base_format == "NF4" or technique in MEASURED[:2]
}
CASES |= {f"{case}, compiled": {**CASES[case], "torch_compile": True} for case in [f"NF4 | {name}" for name in MEASURED[:2]]}


def trace_of(case: str, layers: int, steps: int, machine: Machine) -> dict[str, Any]:
    """Counts of a whole run. Raises RuntimeError where it does not finish."""
    settings = {**USUAL, **CASES[case], "max_steps": steps, "eval_steps": 0, "save_steps": 0}
    recipe = EdgeRecipe(0, MODEL, layers, "", "", "even", True, 0.0, settings)
    with tempfile.TemporaryDirectory(dir=machine.folder) as folder, on_machine(machine, wsl=False):
        output, trace = Path(folder) / "output.txt", Path(folder) / "trace"
        if in_fork(lambda: _create(recipe, machine.folder, Path(folder)), output):
            raise RuntimeError(f"{case}: no plan: {output.read_text(encoding='utf-8')[-500:]}")
        command = [sys.executable, "-m", "finetune.run.supervise", str(Path(folder) / "run")]
        environment = {**os.environ, "STAND_IN_TRACE": str(trace), "FINETUNE_CACHE": str(Path(folder) / "cache")}
        status = subprocess.run(command, env=environment, check=False).returncode
        if status:
            raise RuntimeError(f"{case}: the run ended with {status}")
        counts = [json.loads(path.read_text(encoding="utf-8")) for path in Path(folder).glob("trace.*")]
        return max(counts, key=lambda count: count["launches"])  # the worker's


def _create(recipe: EdgeRecipe, folder: Path, run_folder: Path) -> int:
    from finetune.run.prepare import create_run

    with_own_caches(folder)
    create_run(prepare_recipe(recipe, write_model(recipe, folder), run_folder, folder / "even.jsonl"))
    return 0


def per_micro_batch(fewer_steps: dict[str, Any], more_steps: dict[str, Any]) -> dict[str, Any]:
    """Counts of a micro-batch, those of the optimizer step and logging shared out."""
    n_micro_batches = MICRO_BATCHES * (STEPS[1] - STEPS[0])

    def difference(*keys: str) -> float:
        values = []
        for trace in (more_steps, fewer_steps):
            value: Any = trace
            for key in keys:
                value = value.get(key, 0)
            values.append(value)
        return (values[0] - values[1]) / n_micro_batches

    calls = {call: difference("synchronisations", call) for call in more_steps["synchronisations"]}
    return {
        "kernels": difference("launches"),
        "synchronisations": sum(calls.values()),
        "by_call": json.dumps({call: count for call, count in calls.items() if count}),
        "to_gpu_bytes": sum(difference("to_gpu", kind) for kind in ("copied_bytes", "skipped_bytes")),
        "from_gpu_bytes": sum(difference("from_gpu", kind) for kind in ("copied_bytes", "skipped_bytes")),
    }


def measure(case: str, machine: Machine) -> dict[str, Any]:
    """The line of a case."""
    few, many = (per_micro_batch(*(trace_of(case, layers, steps, machine) for steps in STEPS)) for layers in LAYERS)
    layer_kernels = (many["kernels"] - few["kernels"]) / (LAYERS[1] - LAYERS[0])
    base_format, technique = case.split(" | ")
    return {"technique": technique, "base_format": base_format, **few, "layer_kernels": layer_kernels}


def main() -> int:
    """Count the cases that are missing in the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the names of cases")
    parser.add_argument("--again", action="store_true", help="also cases that are in the results")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    restart_with_libraries("benchmarks.card_kernels")
    results = {} if options.again else read_results(options.output)
    with tempfile.TemporaryDirectory(prefix="card_kernels_") as folder:
        machine = Machine(Path(sys.prefix) / "standin_libraries", Path(folder), describe([GPU], CATALOGUE))
        for case in CASES:
            if case in results or options.only not in case:
                continue
            results[case] = measure(case, machine)
            with options.output.open("w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(results.values())
            print(", ".join(str(value) for value in results[case].values()), flush=True)
    return 0


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Lines of earlier results by case."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {f"{line['base_format']} | {line['technique']}": line for line in csv.DictReader(file)}


if __name__ == "__main__":
    sys.exit(main())
