"""Memory of this project beside plain TRL, Unsloth, LLaMA-Factory and Axolotl, on stand-in GPUs (standin_gpu/README.md).

    make setup-card
    .venv-card-*/bin/python -m benchmarks.card_peers                                # this project and TRL of this environment
    ... --peer unsloth=/venvs/unsloth/bin/python --peer llamafactory=... --peer axolotl=... [--only TEXT ...] [--again]

Each peer needs an environment: `python -m venv`, `pip install --no-deps torch===2.13.0`, in torch's METADATA the
requirements nvidia-* and cuda-* deleted, `pip install PEER`, then `python -m standin_gpu build --site SITE_PACKAGES --include
CUDA/include --out ENVIRONMENT/standin_libraries`. Torch's own allocator allocates; kernels compute nothing, so nothing here
measures speed or losses.

All train QLoRA of rank 16 on all linear layers, on a model of the same shape and on all tokens of the same rows. `peak` is the
peak of three steps; `longest` is the longest row that fits a step beside Adam's state, searched in one process. Results go to
benchmarks/reference/card_peers.csv, a line per cell; finished cells are skipped without --again. The line of a peer that can't
run says why.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import card_runs
from benchmarks.card_runs import CATALOGUE, ROOT, Lines
from benchmarks.peers import run_peer
from standin_gpu.machine import Machine

COLUMNS = (
    "peer", "version", "torch", "model", "gpu", "total_gib", "setting", "micro_batch", "tokens", "allocated_bytes",
    "reserved_bytes", "longest_tokens", "host_bytes", "measured_on", "failed",
)  # fmt: skip
LLAMA, QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-7B-Instruct"
#: GPU -> tokens of the longest row that is tried: Llama-3.1's own limit, less where a peer's settings follow from it.
GPUS = {"rtx-4060": 16_384, "rtx-3060": 32_768, "rtx-4060-ti-16gb": 65_536, "rtx-4090": 131_072}
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
    """One process: a peer, a model, a GPU, and rows of `tokens`; None searches for the longest row."""

    peer: str
    model: str
    gpu: str
    setting: str
    micro_batch: int
    tokens: int | None
    settings: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def columns(self) -> dict[str, Any]:
        """The columns that name a cell."""
        names = ("peer", "model", "gpu", "setting", "micro_batch")
        return {name: getattr(self, name) for name in names} | {"tokens": self.tokens or ""}


def name_of(line: Mapping[str, Any]) -> str:
    """The name of a line's cell."""
    kind, size = ("peak", f"{line['micro_batch']} x {line['tokens']}") if line["tokens"] else ("longest", "1")
    return " | ".join((kind, line["peer"], line["model"], line["gpu"], line["setting"], size))


def all_cells() -> Iterator[Cell]:
    """Every cell, the most informative first."""
    for model, micro_batch in ((LLAMA, 1), (LLAMA, 2), (QWEN, 1), (QWEN, 2)):
        for peer, settings in SETTINGS.items():
            for setting, values in settings.items():
                yield Cell(peer, model, "rtx-4090", setting, micro_batch, 2048, values)
    for gpu in GPUS:
        for peer, (setting, values) in LONGEST.items():
            yield Cell(peer, LLAMA, gpu, setting, 1, None, values)


def main() -> int:
    """Run the selected cells; returns 1 if one has no figures."""
    parser = card_runs.parser_of(__doc__, "card_peers.csv")
    add_peer_options(parser)
    options = parser.parse_args()
    card_runs.restart_with_libraries("benchmarks.card_peers")
    with tempfile.TemporaryDirectory(prefix="card_peers_") as folder:
        models, pythons = options.models or Path(folder), pythons_of(options)
        cells = {name_of(cell.columns): cell for cell in all_cells()}
        cases = {name: functools.partial(run_cell, cell, pythons.get(cell.peer), models) for name, cell in cells.items()}
        new = card_runs.run_missing(cases, options, COLUMNS, name_of)
    return int(any(line["failed"] for lines in new.values() for line in lines))


def add_peer_options(parser: argparse.ArgumentParser) -> None:
    """The options of peers on stand-in GPUs."""
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="interpreter of a tool")
    parser.add_argument("--models", type=Path, help="folder to keep sparse models and caches for the next call")


def pythons_of(options: argparse.Namespace) -> dict[str, str]:
    """Interpreter by peer."""
    return {"finetune": sys.executable, "trl": sys.executable, **dict(peer.split("=", 1) for peer in options.peer)}


def run_cell(cell: Cell, python: str | None, models: Path) -> Lines:
    """The cell's line of the results."""
    if python is None:
        return [line_of(cell, {"failed": "not run: no environment was given"})]
    libraries = Path(python).parent.parent / "standin_libraries"
    if not libraries.is_dir():
        return [line_of(cell, {"failed": "not run: the environment has no stand-in libraries"})]
    steps, search = 3, {}
    tokens = cell.tokens
    if tokens is None:
        start, most = (planned_tokens(cell), MOST_TOKENS) if cell.peer == "finetune" else (1024, GPUS[cell.gpu])
        tokens, steps, search = start, 2, {"most_tokens": most, "start_tokens": start}
    job = {
        "model": card_runs.write_model(cell.model, None, models), "tokens": tokens, "micro_batch": cell.micro_batch,
        "steps": steps, "settings": cell.settings, **search,
    }  # fmt: skip
    return [line_of(cell, run_job(cell.peer, python, cell.gpu, models, rows=3 * cell.micro_batch, **job))]


def planned_tokens(cell: Cell) -> int:
    """Return the length of a long row that this project's planner accepts: the search starts there."""
    from benchmarks.longest_rows import longest
    from benchmarks.peer_watch import assume_host_memory

    assume_host_memory()
    plan = longest(cell.gpu, {"lora_r": 16, **cell.settings})
    return min(plan.settings.max_length, MOST_TOKENS) if plan and plan.settings.max_length else 1024


def run_job(peer: str, python: str, gpu: str, shared: Path, *, rows: int, tokens: int, **job: Any) -> dict[str, Any]:
    """Return the figures of one run on a new machine, or why it failed.

    `rows`: the number of rows. `shared`: folder of models and of the peers' compiled code, kept for the next run.
    """
    with tempfile.TemporaryDirectory(prefix="card_peer_") as temporary:
        folder = Path(temporary)
        (folder / "rows").mkdir()
        path = folder / "rows" / "rows.jsonl"
        text = " ".join(["the"] * (tokens - 2))  # a row's first and last token are the tokenizer's own
        path.write_text((json.dumps({"text": text}) + "\n") * rows, encoding="utf-8")
        machine = Machine(Path(python).parent.parent / "standin_libraries", folder, card_runs.describe([gpu], CATALOGUE))
        environment = {
            **machine.environment, "PYTHONPATH": str(ROOT) if peer == "finetune" else "", "HF_HOME": str(folder / "hub_home"),
            "FINETUNE_CACHE": str(folder / "cache"), "UNSLOTH_COMPILE_LOCATION": str(shared / "unsloth_compiled_cache"),
        }  # fmt: skip
        return run_peer(peer, python, {"rows": str(path), "tokens": tokens, "rank": 16, **job}, folder, environment, LIMIT_S)


def line_of(cell: Cell, figures: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a run; a failed run has no bytes."""
    line: dict[str, Any] = {**dict.fromkeys(COLUMNS, ""), **cell.columns, "measured_on": "stand-in"}
    line |= {"version": figures.get("version", ""), "torch": figures.get("torch", "")}
    line["total_gib"] = CATALOGUE[cell.gpu]["total_gib"]
    failed = figures.get("failed", "")
    if figures.get("out_of_memory"):
        failed = "out of memory"
    elif not failed and cell.tokens and figures.get("batch_tokens", 0) < 0.99 * cell.tokens * cell.micro_batch:
        failed = f"trained on {figures.get('batch_tokens')} tokens in place of {cell.tokens * cell.micro_batch}"
    if failed:
        return {**line, "failed": failed}
    names = ("allocated_bytes", "reserved_bytes", "host_bytes", "longest_tokens")
    return {**line, **{name: figures[name] for name in names if name in figures}}


if __name__ == "__main__":
    sys.exit(main())
