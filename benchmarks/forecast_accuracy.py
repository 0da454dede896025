"""Error of the dry run against GPU memory that others measured.

    python benchmarks/forecast_accuracy.py [CSV] [--full-depth] [--json]

Reads rows with the columns of `benchmarks/reference/measured_memory.csv` (the default) and takes fitcheck-llm's rows with known
settings and metric (`tier=A`, `allocated`). The measured program is a plain training loop, not this
project's trainer: fp16 without autocast on a Tesla T4, NF4 without double quantisation after
`prepare_model_for_kbit_training`, the model's own loss with logits. That loop is repeated here with the project's
tracker, rules, quantised modules and layer extrapolation. No constant is fitted to these rows.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BitsAndBytesConfig, PretrainedConfig

from finetune.compat.bitsandbytes import own_quantisation_maps
from finetune.compat.torch import backward
from finetune.compat.transformers import keys_repeated, without_packing_detection
from finetune.memory.depth import Simulation, simulate_deep
from finetune.memory.fake_model import materialise
from finetune.memory.fake_tensors import card_semantics
from finetune.memory.rules import cublas_workspace_bytes, rules_for
from finetune.memory.simulate import first_step, observe
from finetune.memory.tracker import StorageTracker
from finetune.model.build import build_on_meta
from finetune.model.names import catalogue
from finetune.model.transformers_config import config_from
from finetune.recipe import recipe_from
from tables import REFERENCE, read_table

T4 = (7, 5)
UNITS = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20}


@dataclass(frozen=True)
class Row:
    """One measurement: the settings, and the peaks of torch's allocated and, where it is known, reserved memory in bytes."""

    model: str
    four_bit: bool
    rank: int
    targets: tuple[str, ...]
    tokens: int
    micro_batch: int
    checkpointing: bool
    eager: bool
    measured_bytes: float
    reserved_bytes: float | None
    source: str

    def __str__(self) -> str:
        kind = ("nf4" if self.four_bit else "fp16") + (" eager" if self.eager else " sdpa ")
        recompute = "checkpointed" if self.checkpointing else "kept        "
        return (
            f"{self.model.rpartition('/')[2]:<30} {kind} r{self.rank:<3} {self.micro_batch:>2} x {self.tokens:<5} {recompute}"
        )


def read_rows(path: Path) -> list[Row]:
    """The rows of fitcheck-llm with tier A and the metric `allocated`."""
    measured = [values for values in read_table(path) if values["peak_gb"]]
    bytes_of = {id(values): float(values["peak_gb"]) * UNITS[values["gb_or_gib"]] for values in measured}
    reserved = {values["url_or_path"]: bytes_of[id(values)] for values in measured if values["metric"] == "reserved"}
    return [
        Row(
            model=values["model"],
            four_bit=values["quant"].startswith("nf4"),
            rank=int(values["rank"]),
            targets=tuple(re.split(r"[+, ]+", values["targets"])),
            tokens=int(values["seq_len"]),
            micro_batch=int(values["micro_batch"]),
            checkpointing=values["grad_ckpt"].startswith("on"),
            eager=values["attn"].startswith("eager"),
            measured_bytes=bytes_of[id(values)],
            reserved_bytes=reserved.get(values["url_or_path"]),
            source=values["url_or_path"],
        )
        for values in measured
        if values["metric"] == "allocated" and re.search(r"\btier=A\b", values["notes"]) and "fitcheck" in values["source"]
    ]


def config_of(row: Row) -> PretrainedConfig:
    """The model's configuration, from the project's catalogue or from reference/model_configs.json."""
    configs = {**catalogue(), **json.loads((REFERENCE / "model_configs.json").read_text(encoding="utf-8"))}
    names = (row.model, f"{row.model}-Instruct", row.model.removesuffix("-Instruct"))
    values = next((configs[name] for name in names if name in configs), None)
    if values is None:
        raise SystemExit(f"No configuration of {row.model}. Add its dimensions to {REFERENCE / 'model_configs.json'}")
    return config_from(dict(values), recipe_from({"model_name_or_path": row.model, "dataset": "random ids"}))


def predicted_bytes(row: Row, *, full_depth: bool = False) -> int:
    """The forecast peak of allocated memory for this row's settings."""
    config = config_of(row)
    if full_depth:
        simulation = simulate_row(row, config)
    else:
        simulation, _ = simulate_deep(config, lambda shallow: simulate_row(row, shallow), first_differs=not row.checkpointing)
    return max(peak.total() for peak in simulation.peaks.values()) + 2 * cublas_workspace_bytes(T4)


@contextmanager
def as_measured(tracker: StorageTracker) -> Iterator[None]:
    """Fake tensors, seen by `tracker`. The measured program repeats keys and values for grouped queries."""
    with ExitStack() as stack:
        stack.enter_context(own_quantisation_maps())
        stack.enter_context(card_semantics(0))
        stack.enter_context(keys_repeated())
        stack.enter_context(without_packing_detection())
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(tracker)
        yield


def simulate_row(row: Row, config: PretrainedConfig) -> Simulation:
    """One step of fitcheck-llm's loop, with the optimizer's states allocated, as from the second step on."""
    tracker = StorageTracker(rules_for(T4))
    model = model_of(row, config)
    observe(model, tracker)
    with as_measured(tracker):
        materialise(model, tracker, dtype=torch.float16)
        optimizer = optimizer_of(model)
        first_step(optimizer, model, tracker)
        step(row, model, optimizer, tracker)
    return Simulation(tracker.peaks, tracker.host)


def base_of(row: Row, config: PretrainedConfig) -> Any:
    """The measured program's base model on meta."""
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=False, bnb_4bit_compute_dtype=torch.float16
    )
    attention = "eager" if row.eager else "sdpa"
    return build_on_meta(config, nf4 if row.four_bit else None, dtype=torch.float16, attention=attention)


def model_of(row: Row, config: PretrainedConfig) -> Any:
    """The measured program's model on meta, with adapters."""
    model = base_of(row, config)
    if row.four_bit:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = get_peft_model(
        model, LoraConfig(r=row.rank, lora_alpha=2 * row.rank, target_modules=list(row.targets), task_type="CAUSAL_LM")
    )
    if row.checkpointing:
        model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """The measured program's optimizer; the model is in training mode."""
    model.train()
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], foreach=True)


def step(row: Row, model: Any, optimizer: torch.optim.Optimizer, tracker: StorageTracker) -> None:
    """A training step, as the measured program has it."""
    tracker.phase, tracker.part, tracker.layer = "forward", "activations", None
    ids = torch.zeros((row.micro_batch, row.tokens), dtype=torch.long)
    outputs = model(input_ids=ids, labels=ids)  # kept until the next step: its logits are there in the backward
    tracker.phase, tracker.part, tracker.layer = "loss backward", "loss", None
    backward(outputs.loss)
    tracker.phase, tracker.layer = "optimizer", None
    optimizer.step()


def main() -> int:
    """Print forecast, measurement and error of every row, then their count, mean and worst."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", nargs="?", type=Path, default=REFERENCE / "measured_memory.csv")
    parser.add_argument("--full-depth", action="store_true", help="run all layers of every model")
    parser.add_argument("--json", action="store_true", help="one JSON object for each row, and one with the summary")
    arguments = parser.parse_args()
    rows = read_rows(arguments.csv)
    if not rows:
        print(f"{arguments.csv} has no tier-A row of fitcheck-llm with the metric `allocated`", file=sys.stderr)
        return 1
    errors = []
    for row in rows:
        predicted = predicted_bytes(row, full_depth=arguments.full_depth)
        errors.append(predicted / row.measured_bytes - 1)
        gib = f"predicted {predicted / 2**30:7.3f} GiB  measured {row.measured_bytes / 2**30:7.3f} GiB  error {errors[-1]:+.2%}"
        print(json.dumps({"row": row.source, "predicted_bytes": predicted, "measured_bytes": row.measured_bytes,
                          "error": errors[-1]}) if arguments.json else f"{row}  {gib}", flush=True)  # fmt: skip
    mean, worst = sum(map(abs, errors)) / len(errors), max(errors, key=abs)
    if arguments.json:
        print(json.dumps({"rows": len(errors), "mean_absolute_error": mean, "worst_error": worst}))
    else:
        print(f"{len(errors)} rows: mean |error| {mean:.2%}, worst {worst:+.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
