"""Whether a step takes longer late in a long run, or in a run with many rows: processor seconds of this project's own trainer.

    python benchmarks/step_time.py                               # 10,000 steps; 1,000,000 rows against 1,000
    python benchmarks/step_time.py --steps 2000 --rows 100000

A model of one narrow layer, so that what grows beside the model shows: events, history, order of the rows, reading them. Prints
the step of each tenth of the long run over a fixed piece of work beside it, which other programs on the machine slow down as
much, and the step of runs with few and with many rows in turn. Targets: ratios of at most 1.02.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402

TOKENS, FEW, PAIRS = 32, 1_000, 5


def main() -> None:
    """Run both comparisons."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=10_000)
    arguments.add_argument("--rows", type=int, default=1_000_000)
    options = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        save_model(place / "model")
        step_s, beside_s, _ = step_times(place, options.steps, None)
        tenths = [
            undisturbed(steps) / undisturbed(beside) for steps, beside in zip(*map(in_tenths, (step_s, beside_s)), strict=True)
        ]
        print("step of each tenth of the run over the work beside it: " + " ".join(f"{each:.3f}" for each in tenths))
        print(f"{options.steps} steps: last half / first half {sum(tenths[5:]) / sum(tenths[:5]):.3f}", flush=True)
        ratios = [pair(place, options.rows, number) for number in range(PAIRS)]
    print(f"{options.rows:,} rows / {FEW:,} rows: median ratio {statistics.median(ratios):.3f} over {len(ratios)} pairs")


def pair(place: Path, rows: int, number: int) -> float:
    """The step with many rows over that with few; which comes first alternates."""
    made = {count: step_times(place, 200, count) for count in ((rows, FEW) if number % 2 else (FEW, rows))}
    (many, many_start), (few, few_start) = ((undisturbed(made[count][0]), made[count][2]) for count in (rows, FEW))
    print(
        f"{1000 * many:.2f} ms with {rows:,} rows, {1000 * few:.2f} with {FEW:,}: ratio {many / few:.3f}; "
        f"until the first step {many_start:.1f} s and {few_start:.1f} s",
        flush=True,
    )
    return many / few


def undisturbed(step_s: list[float]) -> float:
    """The step that a tenth of them are faster than: other programs share the processor's caches, and only slow steps down."""
    return statistics.quantiles(step_s, n=10)[0]


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


def step_times(place: Path, steps: int, rows: int | None) -> tuple[list[float], list[float], float]:
    """Processor seconds of each step, of the work beside it, and until the first step. `rows`: in place of the recipe's."""
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
    ends: list[float] = []
    begins: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.process_time())
            work()
            begins.append(time.process_time())

    trainer = Worker(run)._build()[0]
    trainer.add_callback(Clock())
    if rows is not None:
        trainer.train_dataset = many_rows(place / f"{rows}", rows)
    began = time.process_time()
    trainer.train()
    step_s = [end - begin for begin, end in zip(begins, ends[1:], strict=False)]
    return step_s, [begin - end for end, begin in zip(ends, begins, strict=True)], ends[0] - began


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
    main()
