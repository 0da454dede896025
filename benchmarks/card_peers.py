"""Memory of this project beside plain TRL, Unsloth, LLaMA-Factory and Axolotl, on stand-in GPUs (standin_gpu/README.md).

    make setup-card
    .venv-card-*/bin/python -m benchmarks.card_peers                                # this project and TRL of this environment
    ... --peer unsloth=/venvs/unsloth/bin/python --peer llamafactory=... --peer axolotl=... [--only TEXT ...] [--again]

Each peer runs in an environment of its own: `python -m venv`, `pip install --no-deps torch===2.13.0`, in torch's METADATA the
requirements nvidia-* and cuda-* deleted, `pip install PEER`, then `python -m standin_gpu build --site SITE_PACKAGES --include
CUDA/include --out ENVIRONMENT/standin_libraries`. Torch's own allocator allocates; kernels compute nothing, so nothing here
measures speed or losses.

All train QLoRA of rank 16 on all linear layers, with the same model's shape and the same rows, whose tokens are all trained:
`peak` is of three steps; `longest` is the longest row of which a step ends, with Adam's state there, searched in one process;
`largest` is one step of 512 tokens of a model. Results go to benchmarks/reference/card_peers.csv, a line for each; lines that
are there are left out without --again. A peer that can't be run has a line that says why.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.card_matrix import restart_with_libraries
from standin_gpu.machine import Machine, describe, read_catalogue

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "reference" / "card_peers.csv"
COLUMNS = (
    "peer", "version", "torch", "model", "gpu", "total_gib", "setting", "micro_batch", "tokens", "allocated_bytes",
    "reserved_bytes", "longest_tokens", "host_bytes", "measured_on", "failed",
)  # fmt: skip
KEY = ("peer", "model", "gpu", "setting", "micro_batch", "tokens")
PEERS = ("finetune", "trl", "unsloth", "llamafactory", "axolotl")
LLAMA, QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-7B-Instruct"
#: GPU -> tokens of the longest row that is tried: Llama-3.1's own limit, less where a peer's settings follow from it.
GPUS = {"rtx-4060": 16_384, "rtx-3060": 32_768, "rtx-4060-ti-16gb": 65_536, "rtx-4090": 131_072}
#: Largest models are searched among these, from the smallest.
SIZES = (
    "Qwen/Qwen2.5-3B-Instruct", "Qwen/Qwen3-4B", QWEN, LLAMA, "Qwen/Qwen3-14B", "mistralai/Mistral-Small-24B-Instruct-2501",
    "Qwen/Qwen3-32B", "meta-llama/Llama-3.3-70B-Instruct",
)  # fmt: skip
#: What differs from each peer's usual settings. Checkpointing is on by default in TRL, LLaMA-Factory and Unsloth.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "finetune": {
        "planned": {},
        "checkpointing": {"activation_checkpointing": True, "activation_checkpointing_every_n_layers": 1},
    },
    "trl": {"defaults": {}},
    "unsloth": {"defaults": {}, "checkpoints on the GPU": {"use_gradient_checkpointing": True}},
    "llamafactory": {"defaults": {}},
    "axolotl": {"defaults": {}, "checkpointing": {"gradient_checkpointing": True}},
}
#: Settings of the longest rows: what benchmarks/longest_rows.py asks of this project's planner, checkpointing of the others.
LONGEST: dict[str, tuple[str, dict[str, Any]]] = {
    "finetune": ("planned, long rows", {"optim": "paged_adamw_8bit", "activation_checkpointing": "offload"}),
    "trl": ("defaults", {}),
    "unsloth": ("defaults", {}),
    "llamafactory": ("defaults", {}),
    "axolotl": ("checkpointing", {"gradient_checkpointing": True}),
}  # fmt: skip
#: Llama-3.1's own limit: the longest row that is tried with this project.
MOST_TOKENS = 131_072
#: Seconds after which a run has hung.
LIMIT_S = 1800


@dataclass(frozen=True)
class Cell:
    """One process: a peer, a model, a GPU, and what is asked of them."""

    kind: str  # peak, longest, largest
    peer: str
    model: str
    gpu: str
    setting: str
    micro_batch: int
    tokens: int
    settings: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """Unique among all cells."""
        return " | ".join((self.kind, self.peer, self.model, self.gpu, self.setting, f"{self.micro_batch} x {self.tokens}"))


def all_cells(kinds: list[str]) -> Iterator[Cell]:
    """Every cell of these kinds, those that answer most first."""
    for kind in kinds:
        if kind == "longest":
            for gpu in GPUS:
                for peer, (setting, values) in LONGEST.items():
                    yield Cell(kind, peer, LLAMA, gpu, setting, 1, 0, values)
        elif kind == "largest":
            for gpu in GPUS:
                for peer, (setting, values) in LONGEST.items():
                    for model in SIZES:
                        yield Cell(kind, peer, model, gpu, setting, 1, 512, {} if peer == "finetune" else values)
        else:
            for model, micro_batch in ((LLAMA, 1), (LLAMA, 2), (QWEN, 1), (QWEN, 2)):
                for peer, settings in SETTINGS.items():
                    for setting, values in settings.items():
                        yield Cell(kind, peer, model, "rtx-4090", setting, micro_batch, 2048, values)


def main() -> int:
    """Run the cells that are asked for; the exit status says whether all of them have figures."""
    options = arguments()
    restart_with_libraries("benchmarks.card_peers")
    pythons = {"finetune": sys.executable, "trl": sys.executable, **dict(peer.split("=", 1) for peer in options.peer)}
    lines, began, failed = read_lines(options.output), time.monotonic(), 0
    too_large: set[tuple[str, str]] = set()
    with tempfile.TemporaryDirectory(prefix="card_peers_") as folder:
        for cell in all_cells(options.kinds):
            result = lines.get(key_of(cell_values(cell)))
            if result and result["failed"] and cell.kind == "largest":
                too_large.add((cell.peer, cell.gpu))
            wanted = all(text in cell.name for text in options.only) and (options.again or not result)
            if not wanted or (cell.peer, cell.gpu) in too_large or time.monotonic() - began > options.seconds:
                continue
            start = time.monotonic()
            result = run_cell(cell, pythons.get(cell.peer), options.models or Path(folder) / "models")
            failed += bool(result["failed"])
            if result["failed"] and cell.kind == "largest":
                too_large.add((cell.peer, cell.gpu))
            lines[key_of(result)] = result
            write_lines(options.output, lines)
            print(f"{cell.name}: {summary(result)} ({time.monotonic() - start:.0f} s)", flush=True)
    return 1 if failed else 0


def arguments() -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="an environment's interpreter")
    parser.add_argument("--kinds", nargs="*", default=["peak", "longest"], choices=["peak", "longest", "largest"])
    parser.add_argument("--only", nargs="*", default=[], help="texts that all must be in a cell's name")
    parser.add_argument("--again", action="store_true", help="also cells that are in the results")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no cell after so many")
    parser.add_argument("--models", type=Path, help="folder that keeps the sparse models, for another call")
    parser.add_argument("--output", type=Path, default=RESULTS)
    return parser.parse_args()


def run_cell(cell: Cell, python: str | None, models: Path) -> dict[str, Any]:
    """The cell's line of the results."""
    if python is None:
        return line_of(cell, {"failed": "not run: no environment was given"})
    model = models / cell.model.split("/")[1]
    if not (model / "model.safetensors").exists():
        write_model(cell.model, model)
    libraries = Path(python).parent.parent / "standin_libraries"
    if not libraries.is_dir():
        return line_of(cell, {"failed": "not run: the environment has no stand-in libraries"})
    with tempfile.TemporaryDirectory(prefix="card_peer_") as temporary:
        folder = Path(temporary)
        job = write_job(cell, model, folder)
        machine = Machine(libraries, folder, describe([cell.gpu], catalogue()))
        return line_of(cell, run_job(cell.peer, python, job, machine, models))


def write_model(name: str, folder: Path) -> None:
    """The sparse model of a catalogue's name."""
    from finetune.model.catalogue import catalogue as configurations
    from standin_gpu.sparse_model import write_sparse_model

    write_sparse_model(folder, dict(configurations()[name]), ROOT / "finetune" / "bundled" / "tiny-base")


def write_job(cell: Cell, model: Path, folder: Path) -> Path:
    """The job file of benchmarks/card_peer_run.py."""
    tokens, settings, search = cell.tokens, cell.settings, {}
    if cell.kind == "longest":
        tokens, most = (planned_tokens(cell), MOST_TOKENS) if cell.peer == "finetune" else (1024, GPUS[cell.gpu])
        search = {"most_tokens": most, "start_tokens": tokens}
    return write_job_file(
        folder, rows=3 * cell.micro_batch, model=str(model), tokens=tokens, micro_batch=cell.micro_batch,
        steps=3 if cell.kind == "peak" else 2, settings=settings, **search,
    )  # fmt: skip


def write_job_file(folder: Path, *, rows: int, tokens: int, **job: Any) -> Path:
    """The job file of so many rows of so many tokens; a row's first and last token are the tokenizer's own."""
    path = folder / "rows" / "rows.jsonl"
    path.parent.mkdir()
    path.write_text((json.dumps({"text": " ".join(["the"] * (tokens - 2))}) + "\n") * rows, encoding="utf-8")
    (folder / "out").mkdir()
    values = {"rows": str(path), "tokens": tokens, "rank": 16, "folder": str(folder / "out"), **job}
    (folder / "job.json").write_text(json.dumps(values), encoding="utf-8")
    return folder / "job.json"


def planned_tokens(cell: Cell) -> int:
    """Tokens of a long row that this project's planner accepts on the GPU: where its search begins."""
    from benchmarks.card_peer_run import assume_host_memory
    from benchmarks.longest_rows import LAST_LENGTHS, longest, plan_for

    assume_host_memory()
    changes, tokens = {"lora_r": 16, **cell.settings}, min(LAST_LENGTHS[cell.gpu], MOST_TOKENS)
    if plan_for(cell.gpu, tokens, changes).verdict.fits:
        return tokens
    plan = longest(cell.gpu, changes)
    return plan.settings.max_length if plan and plan.settings.max_length else 1024


def run_job(peer: str, python: str, job: Path, machine: Machine, shared: Path) -> dict[str, Any]:
    """Figures of one run, or why there are none. `shared`: folder of the peers' compiled code, for the next run."""
    result, folder = job.with_name("result.json"), job.parent
    environment = {
        "PYTHONPATH": str(ROOT) if peer == "finetune" else "", "HF_HOME": str(folder / "hub_home"),
        "FINETUNE_CACHE": str(folder / "cache"), "UNSLOTH_COMPILE_LOCATION": str(shared / "unsloth_compiled_cache"),
    }  # fmt: skip
    command = [python, str(ROOT / "benchmarks" / "card_peer_run.py"), peer, str(job), str(result)]
    try:
        process = machine.run(*command, check=False, environment=environment, cwd=folder, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"did not end in {LIMIT_S} s"}
    (shared / f"log-{peer}").write_text(process.stdout + process.stderr, encoding="utf-8")
    if not result.exists():
        last = [line for line in process.stderr.splitlines() if line.strip()][-1:]
        return {"failed": f"exit status {process.returncode}: {' '.join(last)[:200]}"}
    return json.loads(result.read_text(encoding="utf-8"))


def catalogue() -> dict[str, Any]:
    """GPUs by their name."""
    return read_catalogue(ROOT / "finetune" / "card" / "cards.json")


def cell_values(cell: Cell) -> dict[str, Any]:
    """The columns that name a cell; those without a number of tokens search for it."""
    return {
        "peer": cell.peer, "model": cell.model, "gpu": cell.gpu, "setting": cell.setting, "micro_batch": cell.micro_batch,
        "tokens": cell.tokens or "",
    }  # fmt: skip


def line_of(cell: Cell, figures: dict[str, Any]) -> dict[str, Any]:
    """A line of the results from what a run says; a failed run has no bytes."""
    line: dict[str, Any] = {**dict.fromkeys(COLUMNS, ""), **cell_values(cell), "measured_on": "stand-in"}
    line |= {"version": figures.get("version", ""), "torch": figures.get("torch", "")}
    line["total_gib"] = catalogue()[cell.gpu]["total_gib"]
    failed = figures.get("failed", "")
    if figures.get("out_of_memory"):
        failed = "out of memory"
    elif not failed and cell.tokens and figures.get("batch_tokens", 0) < 0.99 * cell.tokens * cell.micro_batch:
        failed = f"trained on {figures.get('batch_tokens')} tokens in place of {cell.tokens * cell.micro_batch}"
    if failed:
        return {**line, "failed": failed}
    names = ("allocated_bytes", "reserved_bytes", "host_bytes", "longest_tokens")
    return {**line, **{name: figures[name] for name in names if name in figures}}


def summary(line: dict[str, Any]) -> str:
    """Summary of a line."""
    if line["failed"]:
        return line["failed"]
    sizes = [f"{int(line[name]) / 2**30:.3f} GiB {name.split('_')[0]}" for name in COLUMNS if name.endswith("_bytes")]
    return ", ".join(sizes + ([f"{int(line['longest_tokens']):,} tokens"] if line["longest_tokens"] else []))


def key_of(line: dict[str, Any]) -> tuple[str, ...]:
    """What names a line."""
    return tuple(str(line[name]) for name in KEY)


def read_lines(path: Path) -> dict[tuple[str, ...], dict[str, Any]]:
    """Lines of earlier results by their key."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {key_of(line): dict(line) for line in csv.DictReader(file)}


def write_lines(path: Path, lines: dict[tuple[str, ...], dict[str, Any]]) -> None:
    """All lines in the cells' order."""
    order = [key_of(cell_values(cell)) for cell in all_cells(["peak", "longest", "largest"])]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines[key] for key in sorted(lines, key=lambda key: order.index(key) if key in order else len(order)))


if __name__ == "__main__":
    sys.exit(main())
