"""Host time of a training step beside plain TRL and Unsloth, on a stand-in GPU (standin_gpu/README.md).

    .venv-card-*/bin/python -m benchmarks.host_time [--peer unsloth=PYTHON] [--only TEXT ...] [--layers N] [--tokens N]

Kernels compute nothing there, so a step's processor time is host time. The model is an 8B in NF4 with adapters of rank 16; a
step has one row. benchmarks/card_peers.py describes the peers' environments. The time is the minimum over steps after a
warm-up, as other programs only add time; `start_s` is the time from the command to the first step.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import card_runs
from benchmarks.card_peers import LLAMA, add_peer_options, pythons_of, run_job
from benchmarks.tables import REFERENCE, write_table
from finetune.files import sha256_of

COLUMNS = (
    "program", "version", "torch", "layers", "tokens", "start_s", "processor_ms", "of_trl", "calls", "allocated_bytes",
    "forecast_bytes", "error", "graphs", "compile_s", "failed",
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
    """Measure the selected programs; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_peer_options(parser)
    parser.add_argument("--only", nargs="*", default=[], help="run programs whose names have all these texts")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--output", type=Path, default=REFERENCE / "host_time.csv")
    options = parser.parse_args()
    card_runs.restart_with_libraries("benchmarks.host_time")
    pythons, lines = pythons_of(options), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="host_time_") as temporary:
        models = options.models or Path(temporary)
        model = card_runs.write_model(LLAMA, options.layers, models)
        list(map(sha256_of, Path(model).glob("*.safetensors")))  # the first program would read a new file from disk
        for name, (program, settings) in PROGRAMS.items():
            if not all(text in name for text in options.only) or program not in pythons:
                continue
            figures = run_job(
                program, pythons[program], card_runs.GPU, models, rows=STEPS, tokens=options.tokens, model=model, micro_batch=1,
                steps=STEPS, settings=settings, counted=True,
            )  # fmt: skip
            lines.append(line_of(name, figures, options))
            print(card_runs.shown(lines[-1]), flush=True)
    for line in lines:
        if line["processor_ms"] and lines[0]["processor_ms"]:
            line["of_trl"] = round(line["processor_ms"] / lines[0]["processor_ms"], 3)
    write_table(options.output, lines, COLUMNS)
    return int(any(line["failed"] for line in lines))


def line_of(name: str, figures: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """A line of the results."""
    line: dict[str, Any] = {**dict.fromkeys(COLUMNS, ""), "program": name, "layers": options.layers, "tokens": options.tokens}
    line |= {column: figures[column] for column in COLUMNS if column in figures}
    measured = figures.get("processor_s", [])[FIRST:-2]
    if not measured:
        return {**line, "failed": figures.get("failed") or "no step was measured"}
    line["processor_ms"] = round(1000 * min(measured), 1)
    if forecast := figures.get("forecast_bytes"):
        line["error"] = round(figures["allocated_bytes"] / forecast - 1, 8)
    return line


if __name__ == "__main__":
    sys.exit(main())
