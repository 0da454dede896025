"""Time that this project's callbacks, token counts and events add to TRL's SFTTrainer: two runs that train in turn.

    python benchmarks/overhead.py --steps 120

Both have the same techniques and the same rows in the same order; they train in one process, a few steps each, so that other
programs slow both down alike. Prints the median ratio of the processor seconds of a step, on one thread, with its 95 % interval
over the turns. Target: <= 1.02; the command fails when the whole interval is above it.
"""

from __future__ import annotations

import argparse
import math
import os
import queue
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

#: Steps of a turn, of which the first, with the caches of the other run, is not timed; the most that the target allows.
TURN, ALLOWED = 4, 1.02


def main() -> int:
    """Train both in turn; returns 1 if the target is missed."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--steps", type=int, default=120)
    options = arguments.parse_args()

    import torch

    from finetune.recipe import load_recipe
    from finetune.run.prepare import create_run, prepare
    from finetune.run.worker import Worker

    torch.set_num_threads(1)
    logs: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"max_steps={options.steps}", "save_steps=0", "eval_steps=0"]
        prepared = prepare(load_recipe("tiny-cpu", [*overrides, f"output_dir={folder}/run"]))
        trainers = {"plain": plain_trainer(create_run(prepared)), "ours": Worker(create_run(prepared))._build_trainer()[0]}
        runs = {name: Run(trainer) for name, trainer in trainers.items()}
        for turn in range(options.steps // TURN):
            took = {name: statistics.median(runs[name].advance(TURN)) for name in sorted(runs, reverse=turn % 2 == 1)}
            if turn:  # the first one has what is made once
                logs.append(math.log(took["ours"] / took["plain"]))
    ratio, lower = mean_ratio(logs)
    milliseconds = 1000 * statistics.median(runs["plain"].seconds)
    print(f"with events / plain: {ratio}, {len(logs)} turns, {milliseconds:.0f} ms a plain step")
    return int(lower > ALLOWED)


def plain_trainer(run: Any) -> Any:
    """TRL's own SFTTrainer with the same model, rows, order and arguments, without this project's callbacks."""
    from datasets import load_from_disk
    from transformers import AutoTokenizer, set_seed
    from trl import SFTTrainer

    from finetune.methods.row_order import LongestEarly
    from finetune.model.adapters import attach_adapters, prepare_for_training
    from finetune.model.build import build_base
    from finetune.model.techniques import apply_techniques
    from finetune.model.transformers_config import load_config
    from finetune.planner.plan import read_plan
    from finetune.run.training import sft_config

    plan = read_plan(run.plan)
    set_seed(plan.settings.seed)
    base = build_base(plan.settings, load_config(plan.settings), device="cpu" if plan.card.is_cpu else 0, weights=True)
    trainer = SFTTrainer(
        model=attach_adapters(base, plan.settings),
        args=sft_config(plan, run),
        train_dataset=load_from_disk(str(Path(run.data) / "train")),
        processing_class=AutoTokenizer.from_pretrained(str(Path(run.data) / "tokenizer")),
    )
    lengths = [len(ids) for ids in trainer.train_dataset["input_ids"]]
    order = LongestEarly(lengths, plan.settings.seed, plan.settings.effective_batch_size, plan.total_steps or 0)
    trainer._get_train_sampler = lambda *_: order
    prepare_for_training(trainer.model, plan.settings)
    apply_techniques(trainer.model, plan.settings)
    return trainer


class Run(TrainerCallback):
    """A run, in its own thread, that trains only in its turns, a few steps each. `seconds`: of the timed steps."""

    def __init__(self, trainer: Any) -> None:
        self.seconds: list[float] = []
        self._turns: queue.Queue[int] = queue.Queue()
        self._results: queue.Queue[BaseException | None] = queue.Queue()
        self._left = self._number = 0
        self._timed, self._began = False, 0.0
        self._trainer = trainer
        self._trainer.add_callback(self)
        threading.Thread(target=self._train, daemon=True).start()

    def advance(self, steps: int) -> list[float]:
        """Train `steps`; returns the processor seconds of the timed ones. Raises the trainer's errors."""
        before = len(self.seconds)
        self._turns.put(steps)
        if error := self._results.get():
            raise error
        return self.seconds[before:]

    def _train(self) -> None:
        try:
            self._left = self._turns.get()
            self._began = time.process_time()
            self._trainer.train()
            self._results.put(None)
        except BaseException as error:  # noqa: BLE001 - raised in advance()
            self._results.put(error)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the step; at the end of a turn wait for the next turn."""
        took = time.process_time() - self._began
        self._number, self._left = self._number + 1, self._left - 1
        if self._timed:
            self.seconds.append(took)
        self._timed = self._left > 0
        if not self._left and self._number < state.max_steps:
            self._results.put(None)
            self._left = self._turns.get()
        self._began = time.process_time()


def mean_ratio(logs: list[float]) -> tuple[str, float]:
    """The mean ratio with its 95 % interval as text, and the interval's lower end, from the ratios' logarithms."""
    middle, half_width = statistics.fmean(logs), 1.96 * statistics.stdev(logs) / math.sqrt(len(logs))
    lower, ratio, upper = map(math.exp, (middle - half_width, middle, middle + half_width))
    return f"{ratio:.3f} (95 % interval {lower:.3f} to {upper:.3f})", lower


if __name__ == "__main__":
    sys.exit(main())
