"""Tiny CPU runs of benchmarks/faults.py, trained in forks of its process, and their outcomes."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import shutil
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from benchmarks.forks import start_fork, wait_for
from finetune.bundled import model_path
from finetune.distributed.ranks import ending_path
from finetune.events import Result, Step, read_events
from finetune.recipe import load_recipe
from finetune.run.directory import RunDirectory
from finetune.run.prepare import create_run, prepare
from finetune.run.seal import newest_verified

SHORT = (
    "max_steps=8", "save_steps=2", "effective_batch_size=2", "per_device_train_batch_size=1", "dataset.max_rows=16",
    "save_total_limit=3", "lora_r=4", "lora_alpha=8", "eval_steps=0", "sample_answers=0", "lora_dropout=0.1",
)  # fmt: skip
#: A base of two layers in float32 and few adapters: a kill costs a third of the CPU time that it takes with the bundled recipe.
SMALL = ("load_in_4bit=false", "target_modules=[q_proj,v_proj]")
_LAYERS = 2
_OF_CHECKPOINT = ("optimizer.pt", "scheduler.pt", "rng_state*.pth", "adapter_model.safetensors")
_NOT_BEFORE_A_START = ("events.jsonl", "log.txt", "adapter*", ".adapter", "checkpoint-*", ".partial", "*lock", "launch")


@dataclass
class Tally:
    """Cases of one kind by their outcome. `failures` has a line for each case that ended otherwise than it must."""

    kind: str
    target: int
    until: float
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether more cases are wanted and there is time for them."""
        return self.outcomes.total() < self.target and time.monotonic() < self.until

    def fail(self, case: str) -> None:
        """Count a case that ended otherwise than it must."""
        self.outcomes["FAILED"] += 1
        self.failures.append(f"{self.kind}: {case}")

    def row(self) -> str:
        """One line of the table."""
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return f"| {self.kind} | {self.outcomes.total()} of {self.target} | {outcomes} |"


def new_run(folder: Path, *overrides: str) -> RunDirectory:
    """A run of a few steps on a CPU that has not been started."""
    from finetune.model.padding import needs_padding_mask
    from finetune.model.transformers_config import load_config

    settings = load_recipe("tiny-cpu", [*SHORT, *overrides, f"output_dir={folder}"])
    needs_padding_mask(load_config(settings))  # is remembered, so that a fork need not compute it
    return create_run(prepare(settings))


def small_base(path: Path) -> Path:
    """The bundled model's first layers as a base model."""
    shutil.copytree(model_path("tiny"), path)
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": _LAYERS}), encoding="utf-8")
    left_out = tuple(f"model.layers.{number}." for number in range(_LAYERS, config["num_hidden_layers"]))
    weights = load_file(path / "model.safetensors")
    first = {name: weight for name, weight in weights.items() if not name.startswith(left_out)}
    save_file(first, path / "model.safetensors", {"format": "pt"})
    return path


def fresh_copy(run: RunDirectory, path: Path) -> RunDirectory:
    """A copy of a run as it was before its start."""
    return RunDirectory(Path(shutil.copytree(run.path, path, ignore=shutil.ignore_patterns(*_NOT_BEFORE_A_START))))


def overfitting_rows(folder: Path) -> tuple[str, ...]:
    """Write rows whose held-out loss falls and then rises, as held-out answers differ; returns their settings."""
    chance = random.Random(1)
    for split, answer in (("train", "red"), ("held", "blue")):
        rows = [{"prompt": f"The {split} box {chance.randrange(10**6)} is ", "completion": answer} for _ in range(8)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return (
        f"dataset.path={folder}/train.jsonl", f"dataset.eval_path={folder}/held.jsonl", "max_steps=12", "eval_steps=2",
        "save_steps=2", "effective_batch_size=8", "per_device_train_batch_size=8", "learning_rate=4e-3",
        "lr_scheduler_type=constant", "save_total_limit=1",
    )  # fmt: skip


def work_of(run: RunDirectory, environment: dict[str, str] | None = None) -> Callable[[], int]:
    """The work of a training process of a run."""

    def work() -> int:
        os.environ.update(environment or {})
        from finetune.run.worker import main

        sys.argv[1:] = [str(run.path)]
        return main()

    return work


def start_training(run: RunDirectory, processes: int = 1) -> list[int]:
    """Start the training processes of a run; returns their process ids."""
    if processes == 1:
        return [start_fork(work_of(run), run.log)]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ending_path(run.path, 0).parent.mkdir(exist_ok=True)
    common = {
        "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    ranks = ({**common, "RANK": str(number), "LOCAL_RANK": str(number)} for number in range(processes))
    return [start_fork(work_of(run, environment), run.log) for environment in ranks]


def train(run: RunDirectory, processes: int = 1) -> int:
    """Train to the end; returns the worst exit status."""
    return max(abs(wait_for(pid)) for pid in start_training(run, processes))


def result_of(run: RunDirectory) -> dict[str, Any]:
    """All that must be equal in a run that was killed: adapters, newest checkpoint, result, loss by step, the last step.

    Raises ValueError for a step that shows another loss when it is trained again.
    """
    losses: dict[int, Any] = {}
    events = read_events(run.events)
    for event in events:
        if isinstance(event, Step) and losses.setdefault(event.step, event.loss) != event.loss:
            raise ValueError(f"step {event.step} has loss {event.loss} and {losses[event.step]}")
    adapters = {path.parent.name: file_hash(path) for path in run.path.glob("adapter*/adapter_model.safetensors")}
    newest = newest_verified(run.checkpoints)[0]
    paths = [path for pattern in _OF_CHECKPOINT for path in (newest.path.glob(pattern) if newest else ())]
    results = [dataclasses.replace(event, time_s=None) for event in events if isinstance(event, Result)]
    return {
        "adapters": adapters, "checkpoint": {path.name: file_hash(path) for path in paths}, "result": results[-1:],
        "losses": losses, "steps": max(losses, default=0),
    }  # fmt: skip


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
