"""Time that this project's callbacks, token counts and events add to TRL's SFTTrainer: paired runs, with and without them.

    python benchmarks/overhead.py --pairs 5 --steps 60

Prints the processor seconds of each pair, on one thread, and the median ratio. Both have the same techniques. Target: <= 1.02.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def main() -> None:
    """Run the pairs in alternating order, after a warm-up pair."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=5)
    arguments.add_argument("--steps", type=int, default=60)
    options = arguments.parse_args()

    import torch

    from finetune.recipe import load_recipe
    from finetune.run.prepare import create_run, prepare

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        overrides = [f"max_steps={options.steps}", "save_steps=0", "eval_steps=0"]
        prepared = prepare(load_recipe("tiny-cpu", [*overrides, f"output_dir={place}/run"]))
        ratios = []
        for pair in range(options.pairs + 1):
            order = (False, True) if pair % 2 else (True, False)
            seconds = {ours: train(create_run(prepared), ours) for ours in order}
            ratio = seconds[True] / seconds[False]
            note = "  (warm-up, not counted)" if pair == 0 else ""
            print(
                f"pair {pair}: plain {seconds[False]:.2f} s, with events {seconds[True]:.2f} s, ratio {ratio:.4f}{note}",
                flush=True,
            )
            if pair:
                ratios.append(ratio)
    print(f"median ratio {statistics.median(ratios):.4f} over {len(ratios)} pairs of {options.steps} steps")


def train(run: Any, ours: bool) -> float:
    """Processor seconds of trainer.train(), without loading."""
    from finetune.run.worker import Worker

    if ours:
        worker = Worker(run)
        trainer, _ = worker._build()
    else:
        trainer = plain_trainer(run)
    began = time.process_time()
    trainer.train()
    return time.process_time() - began


def plain_trainer(run: Any) -> Any:
    """TRL's own SFTTrainer with the same model, data and arguments, without this project's callbacks."""
    from datasets import load_from_disk
    from transformers import AutoTokenizer, set_seed
    from trl import SFTTrainer

    from finetune.model.adapters import attach_adapters, prepare_for_training
    from finetune.model.build import build_base
    from finetune.model.techniques import apply_techniques
    from finetune.model.transformers_config import load_config
    from finetune.plan.plan import read_plan
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
    prepare_for_training(trainer.model, plan.settings)
    apply_techniques(trainer.model, plan.settings)
    return trainer


if __name__ == "__main__":
    main()
