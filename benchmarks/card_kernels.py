"""Kernels, synchronisations and copies of a micro-batch by technique, counted on a stand-in GPU.

    .venv-card-*/bin/python -m benchmarks.card_kernels [--only TEXT ...] [--again]

Runs of 2 and 4 optimizer steps with 4 and 8 layers of an 8B model; their differences are the counts of a step and of a layer.
Results go to benchmarks/reference/card_kernels.csv; all columns but `layer_kernels` are with 4 layers.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import card_runs
from benchmarks.card_cells import FORMATS, TECHNIQUES, Cell
from benchmarks.card_runs import GPU, Lines

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


def trace_of(case: str, layers: int, steps: int, folder: Path) -> dict[str, Any]:
    """Return the counts of a whole run. Raises RuntimeError if it does not finish."""
    settings = {**CASES[case], "max_steps": steps, "eval_steps": 0, "save_steps": 0}
    cell = Cell(MODEL, GPU, "", "", "even", settings=settings, layers=layers)
    with tempfile.TemporaryDirectory(dir=folder) as traces, card_runs.created(cell, folder) as (plan, run):
        worker = card_runs.train(plan, run, STAND_IN_TRACE=f"{traces}/trace")
        if worker.returncode:
            raise RuntimeError(f"{case}: the run ended with {worker.returncode}: {worker.stderr[-500:]}")
        counts = [json.loads(path.read_text(encoding="utf-8")) for path in Path(traces).iterdir()]
        return max(counts, key=lambda count: count["launches"])  # the worker's


def per_micro_batch(fewer_steps: dict[str, Any], more_steps: dict[str, Any]) -> dict[str, Any]:
    """Return the counts of a micro-batch, including its share of the optimizer step and of logging."""
    n_micro_batches = MICRO_BATCHES * (STEPS[1] - STEPS[0])

    def difference(*keys: str) -> float:
        more, fewer = (
            functools.reduce(lambda value, key: value.get(key, 0), keys, trace) for trace in (more_steps, fewer_steps)
        )
        return (more - fewer) / n_micro_batches

    calls = {call: difference("synchronisations", call) for call in more_steps["synchronisations"]}
    copied = {way: sum(difference(way, kind) for kind in ("copied_bytes", "skipped_bytes")) for way in ("to_gpu", "from_gpu")}
    return {
        "kernels": difference("launches"), "synchronisations": sum(calls.values()),
        "by_call": json.dumps({call: count for call, count in calls.items() if count}),
        **{f"{way}_bytes": size for way, size in copied.items()},
    }  # fmt: skip


def measure(case: str, folder: Path) -> Lines:
    """The line of a case."""
    few, many = (per_micro_batch(*(trace_of(case, layers, steps, folder) for steps in STEPS)) for layers in LAYERS)
    layer_kernels = (many["kernels"] - few["kernels"]) / (LAYERS[1] - LAYERS[0])
    base_format, technique = case.split(" | ")
    return [{"technique": technique, "base_format": base_format, **few, "layer_kernels": layer_kernels}]


def main() -> int:
    """Count the missing cases."""
    options = card_runs.parser_of(__doc__, "card_kernels.csv").parse_args()
    card_runs.restart_with_libraries("benchmarks.card_kernels")
    with tempfile.TemporaryDirectory(prefix="card_kernels_") as folder:
        cases = {case: functools.partial(measure, case, Path(folder)) for case in CASES}
        card_runs.run_missing(cases, options, COLUMNS, lambda line: f"{line['base_format']} | {line['technique']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
