"""Whether a step takes longer late in a long run, or in a run with many rows: processor seconds of this project's own trainer.

    python benchmarks/step_time.py                               # 10,000 steps; 1,000,000 rows against 1,000
    python benchmarks/step_time.py --steps 2000 --rows 100000

A model of one narrow layer, so that what grows beside the model shows: events, history, order of the rows, reading them. Two
measures of a step, one exact and one of time:

* calls: how many functions Python calls in a step, its own and C's, by sys.setprofile in one step of 47. No other program
  changes it. It shows any loop in Python that grows, and none inside one C function.
* processor seconds, of two runs in one process that train in turn, a few steps each: the long run beside runs that begin anew
  every 500 steps, and the run with many rows beside one with few. Other programs slow both down alike. Each turn gives one
  ratio of the medians of a step; the growth over the long run is the slope of a line through them.

Targets: ratios of at most 1.02. The command fails when the calls miss it, or when the whole 95 % interval of the seconds does.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks.interleaved_runs import Run, ratio_text  # noqa: E402

TOKENS, FEW, ALLOWED = 32, 1_000, 1.02
#: Steps of a turn of the long run and of the one beside it; the first, with the caches of the other run, is not timed.
TURN, BESIDE = 8, 4
#: Steps of a short run; of each run when runs with many and with few rows are compared.
SHORT, COMPARED = 500, 1_000


def main() -> int:
    """Run both comparisons; returns 1 when a step makes more calls or takes longer late in a run, or with many rows."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=10_000)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        save_model(folder / "model")
        missed = [with_many_rows(folder, options.rows), late_in_a_run(folder, options.steps)]
    return int(any(missed))


def late_in_a_run(folder: Path, steps: int) -> bool:
    """Time a long run beside short ones; returns whether a target is missed."""
    run = Run(trainer_of(folder, steps))
    beside = turns_of(lambda: Run(trainer_of(folder, SHORT)), SHORT)
    ratios: list[float] = []
    turns = steps // TURN
    tenth = max(1, turns // 10)
    for turn in range(1, turns + 1):
        mine, theirs = run.advance(TURN), next(beside)
        ratios.append(statistics.median(mine) / statistics.median(theirs))
        if turn % tenth == 0:
            print(f"step {turn * TURN:,}: {statistics.median(ratios[-tenth:]):.3f} x a short run's step", flush=True)
    half = len(run.calls) // 2
    calls = statistics.median(run.calls[half:]) / statistics.median(run.calls[:half])
    growth, wide = trend(ratios)
    print(
        f"{steps:,} steps: calls, last half / first half {calls:.4f} ({statistics.median(run.calls):,.0f} a step); processor "
        f"seconds, end / begin {ratio_text(growth, wide)}, {len(ratios)} turns, "
        f"{1000 * statistics.median(run.seconds):.2f} ms a step",
        flush=True,
    )
    return max(calls, math.exp(growth - wide)) > ALLOWED


def with_many_rows(folder: Path, rows: int) -> bool:
    """Time a run with many rows beside one with few, once built before it and once after it: of two equal runs the one that was
    built first can take some per cent longer. Returns whether a target is missed."""
    logs, calls = [], []
    for first in (rows, FEW):
        runs = {count: Run(trainer_of(folder, COMPARED, count)) for count in (first, rows + FEW - first)}
        for turn in range(COMPARED // BESIDE):
            took = {count: statistics.median(runs[count].advance(BESIDE)) for count in sorted(runs, reverse=turn % 2 == 1)}
            if turn:  # the first one has the rows' order in it
                logs.append(math.log(took[rows] / took[FEW]))
        calls.append(statistics.median(runs[rows].calls) / statistics.median(runs[FEW].calls))
        print(
            f"{rows:,} rows / {FEW:,} rows, {first:,} built first: calls {calls[-1]:.4f}, processor seconds "
            f"{math.exp(statistics.fmean(logs[1 - COMPARED // BESIDE :])):.3f}, until the first step's end "
            f"{runs[rows].first_s:.1f} s and {runs[FEW].first_s:.1f} s",
            flush=True,
        )
    middle, wide = statistics.fmean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    print(f"{rows:,} rows / {FEW:,} rows: processor seconds {ratio_text(middle, wide)}, {len(logs)} turns", flush=True)
    return max(*calls, math.exp(middle - wide)) > ALLOWED


def trend(ratios: list[float]) -> tuple[float, float]:
    """Last ratio over first one, as a logarithm, by a line through the ratios' logarithms; and half of its 95 % interval."""
    logs, count = [math.log(ratio) for ratio in ratios], len(ratios)
    xs = [x / (count - 1) - 0.5 for x in range(count)]
    middle, squares = statistics.fmean(logs), sum(x**2 for x in xs)
    slope = sum(x * value for x, value in zip(xs, logs, strict=True)) / squares
    residuals = [value - middle - slope * x for x, value in zip(xs, logs, strict=True)]
    error = math.sqrt(sum(residual**2 for residual in residuals) / (count - 2) / squares)
    return slope, 1.96 * error


def turns_of(begin: Callable[[], Run], steps: int) -> Iterator[list[float]]:
    """Seconds of the steps of one turn after the other, of runs that begin anew after so many steps."""
    while True:
        run = begin()
        run.advance(BESIDE)  # its start
        for _ in range(steps // BESIDE - 1):
            yield run.advance(BESIDE)


def save_model(folder: Path) -> None:
    """One narrow layer, with the bundled model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import finetune

    bundled = Path(finetune.__file__).parent / "bundled" / "tiny-base"
    values = json.loads((bundled / "config.json").read_text(encoding="utf-8"))
    special = {name: values[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id") if name in values}
    LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, **special,
    )).save_pretrained(folder)  # fmt: skip
    for file in bundled.glob("*token*"):
        shutil.copy(file, folder)


def trainer_of(folder: Path, steps: int, rows: int | None = None) -> Any:
    """The trainer of a new run of so many steps, and with so many rows."""
    from finetune.run.prepare import create_run
    from finetune.run.worker import Worker

    trainer = Worker(create_run(prepared(folder, steps)))._build()[0]
    if rows is not None:
        trainer.train_dataset = many_rows(folder / f"{rows}", rows)
    return trainer


@functools.cache
def prepared(folder: Path, steps: int) -> Any:
    """The plan and the rows of a run of so many steps."""
    from finetune.recipe import recipe_from
    from finetune.run.prepare import prepare

    (folder / "rows.jsonl").write_text("".join(json.dumps({"text": f"a row {n}"}) + "\n" for n in range(100)), encoding="utf-8")
    return prepare(recipe_from({
        "model_name_or_path": str(folder / "model"), "dataset": {"path": str(folder / "rows.jsonl")}, "gpu": "cpu", "lora_r": 2,
        "lora_alpha": 4.0, "max_steps": steps, "effective_batch_size": 1, "eval_steps": 0, "save_steps": 0, "max_length": 64,
        "learning_rate": 1e-4, "output_dir": str(folder / "run"),
    }))  # fmt: skip


def many_rows(folder: Path, rows: int) -> Any:
    """A dataset on disk with so many rows of TOKENS tokens."""
    import numpy
    import pyarrow
    from datasets import Dataset, load_from_disk

    if not folder.exists():
        ids = numpy.random.default_rng(0).integers(3, 100, rows * TOKENS)
        column = pyarrow.ListArray.from_arrays(numpy.arange(rows + 1, dtype="int32") * TOKENS, ids)
        Dataset(pyarrow.table({"input_ids": column, "labels": column})).save_to_disk(str(folder))
    return load_from_disk(str(folder))


if __name__ == "__main__":
    sys.exit(main())
