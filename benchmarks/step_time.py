"""Whether a step takes longer late in a long run, or in a run with many rows: processor seconds of this project's own trainer.

    python benchmarks/step_time.py                               # 10,000 steps; 1,000,000 rows against 1,000
    python benchmarks/step_time.py --steps 2000 --rows 100000

A model of one narrow layer, so that what grows beside the model shows: events, history, order of the rows, reading them. Two
measures of a step, one exact and one of time:

* calls: how many functions Python calls in a step, its own and C's, by sys.setprofile in one step of 47. No other program
  changes it. It shows any loop in Python that grows, and none inside one C function.
* processor seconds: those of each step over those of a fixed piece of work just before it, which other programs slow down as
  much; the median of a tenth of the run, or of a run, and runs with few and with many rows in turn.

Targets: ratios of at most 1.02; the command fails when the number of calls misses it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402

TOKENS, FEW, PAIRS, ALLOWED = 32, 1_000, 5, 1.02
#: Calls are counted in one step of so many, which is not timed; an epoch, whose end makes more calls, has 100.
EVERY = 47


@dataclass
class Steps:
    """A run: seconds of each timed step over those of the work before it, calls of each counted step, seconds to the first."""

    over_work: list[float]
    calls: list[int]
    start_s: float


def main() -> int:
    """Run both comparisons; returns 1 when a step makes more calls late in a run, or with many rows."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=10_000)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    arguments.add_argument("--pairs", type=int, default=PAIRS)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        save_model(place / "model")
        long = steps_of(place, options.steps, None)
        tenths = [statistics.median(each) for each in in_tenths(long.over_work)]
        print("step of each tenth of the run over the work beside it: " + " ".join(f"{each:.3f}" for each in tenths))
        half = len(long.calls) // 2
        longer = statistics.median(long.calls[half:]) / statistics.median(long.calls[:half])
        print(
            f"{options.steps} steps, last half / first half: calls {longer:.4f} ({statistics.median(long.calls):,.0f} a step), "
            f"processor seconds {statistics.median(tenths[5:]) / statistics.median(tenths[:5]):.3f}",
            flush=True,
        )
        pairs = [pair(place, options.rows, number) for number in range(options.pairs)]
    more = max(calls for calls, _ in pairs)
    print(
        f"{options.rows:,} rows / {FEW:,} rows: calls {more:.4f}, processor seconds, median of {len(pairs)} pairs "
        f"{statistics.median(seconds for _, seconds in pairs):.3f}"
    )
    return int(max(longer, more) > ALLOWED)


def pair(place: Path, rows: int, number: int) -> tuple[float, float]:
    """Calls and seconds of a step with many rows over those with few; which comes first alternates."""
    made = {count: steps_of(place, 6 * EVERY, count) for count in ((rows, FEW) if number % 2 else (FEW, rows))}
    many, few = made[rows], made[FEW]
    calls = statistics.median(many.calls) / statistics.median(few.calls)
    seconds = statistics.median(many.over_work) / statistics.median(few.over_work)
    print(
        f"{rows:,} rows / {FEW:,}: calls {calls:.4f}, processor seconds {seconds:.3f}; until the first step "
        f"{many.start_s:.1f} s and {few.start_s:.1f} s",
        flush=True,
    )
    return calls, seconds


def save_model(folder: Path) -> None:
    """One narrow layer, with the bundled model's tokenizer."""
    import shutil

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


def in_tenths(values: list[float]) -> list[list[float]]:
    """Ten lists of equally many values; the rest is left out."""
    size = len(values) // 10
    return [values[start : start + size] for start in range(0, 10 * size, size)]


def work() -> None:
    """A few milliseconds of small operators and of Python, as in a step."""
    x = torch.ones(32, 32)
    for number in range(200):
        x = torch.addmm(x, x, x, alpha=1e-3).mul_(0.1)
        json.dumps({"number": number})


def steps_of(place: Path, steps: int, rows: int | None) -> Steps:
    """A run's steps. `rows`: in place of the recipe's."""
    from transformers import TrainerCallback

    from finetune.recipe import recipe_from
    from finetune.run.prepare import create_run, prepare
    from finetune.run.worker import Worker

    (place / "rows.jsonl").write_text("".join(json.dumps({"text": f"a row {n}"}) + "\n" for n in range(100)), encoding="utf-8")
    run = create_run(prepare(recipe_from({
        "model_name_or_path": str(place / "model"), "dataset": {"path": str(place / "rows.jsonl")}, "gpu": "cpu", "lora_r": 2,
        "lora_alpha": 4.0, "max_steps": steps, "effective_batch_size": 1, "eval_steps": 0, "save_steps": 0, "max_length": 64,
        "learning_rate": 1e-4, "output_dir": str(place / "run"),
    })))  # fmt: skip
    over_work: list[float] = []
    calls: list[int] = []
    starts: list[float] = []

    class Clock(TrainerCallback):
        began, work_s, counted, number = 0.0, 1.0, -1, 0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            sys.setprofile(None)
            ended = time.process_time()
            if self.counted >= 0:
                calls.append(self.counted)
            elif self.number:
                over_work.append((ended - self.began) / self.work_s)
            else:
                starts.append(ended)
            self.number, self.counted = self.number + 1, -1
            before = time.process_time()
            work()
            self.began = time.process_time()
            self.work_s = self.began - before
            if self.number % EVERY == 0:
                self.counted = 0
                sys.setprofile(self.count)

        def count(self, _frame: Any, event: str, _argument: Any) -> None:
            self.counted += event in ("call", "c_call")

    trainer = Worker(run)._build()[0]
    trainer.add_callback(Clock())
    if rows is not None:
        trainer.train_dataset = many_rows(place / f"{rows}", rows)
    began = time.process_time()
    trainer.train()
    return Steps(over_work, calls, starts[0] - began)


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
