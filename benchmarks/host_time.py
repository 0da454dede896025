"""The host's time of a training step beside plain TRL and Unsloth, on a stand-in GPU (standin_gpu/README.md).

    .venv-card-*/bin/python -m benchmarks.host_time [--peer unsloth=PYTHON] [--only TEXT ...] [--layers N] [--tokens N]

Kernels compute nothing there, so that a step's processor time is the host's. An 8B in NF4, adapters of rank 16, one row a step.
Environments of peers are those of benchmarks/card_peers.py. All rows are measured one after the other. The time is the least
of the steps after the first ones: other programs on the machine only add to it. Results: benchmarks/reference/host_time.csv.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.card_matrix import restart_with_libraries
from benchmarks.card_peers import LLAMA, ROOT, catalogue, run_job, write_job_file
from standin_gpu.machine import Machine, describe

RESULTS = ROOT / "benchmarks" / "reference" / "host_time.csv"
COLUMNS = (
    "program", "version", "torch", "layers", "tokens", "processor_ms", "of_trl", "calls", "allocated_bytes", "forecast_bytes",
    "error", "graphs", "compile_s", "failed",
)  # fmt: skip
NOTHING, EVERY = (
    {"activation_checkpointing": False},
    {"activation_checkpointing": True, "activation_checkpointing_every_n_layers": 1},
)
#: Name -> program and its settings.
PROGRAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "TRL, recomputed": ("trl", {}),
    "TRL, nothing recomputed": ("trl", {"gradient_checkpointing": False}),
    "Unsloth, recomputed": ("unsloth", {}),
    "Unsloth, nothing recomputed": ("unsloth", {"use_gradient_checkpointing": False}),
    "lean, nothing recomputed": ("finetune", {**NOTHING, "torch_compile": False}),
    "lean, recomputed": ("finetune", {**EVERY, "torch_compile": False}),
    "compiled, nothing recomputed": ("finetune", {**NOTHING, "torch_compile": True}),
    "compiled, recomputed": ("finetune", {**EVERY, "torch_compile": True}),
}
#: Steps, and the first of those that are measured.
STEPS, FIRST = 32, 5


def main() -> int:
    """Measure the programs that are asked for; the exit status says whether all of them ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="an environment's interpreter")
    parser.add_argument("--only", nargs="*", default=[], help="texts that all must be in a program's name")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--gpu", default="rtx-4090")
    parser.add_argument("--models", type=Path, help="folder that keeps the sparse models and caches, for another call")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    restart_with_libraries("benchmarks.host_time")
    pythons = {"finetune": sys.executable, "trl": sys.executable, **dict(peer.split("=", 1) for peer in options.peer)}
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="host_time_") as temporary:
        models = options.models or Path(temporary)
        for name, (program, settings) in PROGRAMS.items():
            if not all(text in name for text in options.only) or program not in pythons:
                continue
            began = time.monotonic()
            figures = measure(program, pythons[program], settings, options, models)
            lines.append(line_of(name, figures, options))
            print(
                ", ".join(f"{key} {value}" for key, value in lines[-1].items() if value != ""),
                f"({time.monotonic() - began:.0f} s)",
                flush=True,
            )
    for line in lines:
        line["of_trl"] = ratio(line, lines[0])
    with options.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    return int(any(line["failed"] for line in lines))


def measure(program: str, python: str, settings: dict[str, Any], options: argparse.Namespace, models: Path) -> dict[str, Any]:
    """Figures of a program's run."""
    from finetune.model.catalogue import catalogue as configurations
    from standin_gpu.sparse_model import write_sparse_model

    model = models / f"llama-{options.layers}"
    if not (model / "model.safetensors").exists():
        values = {**configurations()[LLAMA], "num_hidden_layers": options.layers}
        write_sparse_model(model, values, ROOT / "finetune" / "bundled" / "tiny-base")
    with tempfile.TemporaryDirectory(prefix="host_time_") as temporary:
        folder = Path(temporary)
        job = write_job_file(
            folder,
            rows=STEPS,
            model=str(model),
            tokens=options.tokens,
            micro_batch=1,
            steps=STEPS,
            settings=settings,
            counted=True,
        )
        machine = Machine(Path(python).parent.parent / "standin_libraries", folder, describe([options.gpu], catalogue()))
        return run_job(program, python, job, machine, models)


def line_of(name: str, figures: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """A line of the results."""
    line: dict[str, Any] = {**dict.fromkeys(COLUMNS, ""), "program": name, "layers": options.layers, "tokens": options.tokens}
    line |= {column: figures[column] for column in COLUMNS if column in figures}
    measured = [1000 * seconds for seconds in figures.get("processor_s", [])[FIRST:-2]]
    if not measured:
        return {**line, "failed": figures.get("failed") or "no step was measured"}
    line["processor_ms"] = round(min(measured), 1)
    if forecast := figures.get("forecast_bytes"):
        line["error"] = round(figures["allocated_bytes"] / forecast - 1, 8)
    return line


def ratio(line: dict[str, Any], reference: dict[str, Any]) -> float | str:
    """Processor time as a share of the first program's."""
    both = line["processor_ms"], reference["processor_ms"]
    return round(both[0] / both[1], 3) if all(both) else ""


if __name__ == "__main__":
    sys.exit(main())
