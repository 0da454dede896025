"""Useful tokens per second on a CPU against TRL's SFTTrainer with its defaults: paired runs over the same rows, alternating.

    python benchmarks/variable_lengths.py --pairs 5 --rows 160           # lengths lognormal, 48 to 960 tokens
    python benchmarks/variable_lengths.py --pairs 5 --rows 160 --equal   # all rows have 256 tokens

Both train one epoch of the bundled model in fp32 with LoRA of the same rank on the same layers, 8 rows a step. TRL's defaults
are 8 rows a micro-batch in random order and gradient checkpointing; only its bf16 is off, which a CPU may lack. The recipe
leaves the rest to the planner. Targets: the median ratio is at least 1.5, and at least 1.0 with equal lengths.

Seconds are those of the process's one thread on the processor, so that other programs on the machine don't count.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402

SHORTEST, USUAL, LONGEST, EQUAL = 48, 150, 960, 256
BATCH, RANK = 8, 16


def main() -> None:
    """Run the pairs in alternating order, after a warm-up pair."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=5)
    arguments.add_argument("--rows", type=int, default=160)
    arguments.add_argument("--equal", action="store_true", help="rows of equal length")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        prepared = prepared_run(Path(folder), lengths(options.rows, options.equal))
        settings, data = prepared.plan.settings, prepared.plan.data
        print(
            f"{data.rows} rows, {data.total_tokens:,} tokens; planned: "
            f"{settings.per_device_train_batch_size} x {settings.gradient_accumulation_steps}, "
            f"activation_checkpointing {settings.activation_checkpointing}"
        )
        ratios = [pair(prepared, number, data.total_tokens) for number in range(options.pairs + 1)][1:]
    print(f"median ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}) over {len(ratios)} pairs")


def lengths(rows: int, equal: bool) -> list[int]:
    """Tokens of each row, from a fixed seed."""
    drawn = random.Random(0)
    uneven = [min(LONGEST, max(SHORTEST, round(USUAL * drawn.lognormvariate(0, 0.8)))) for _ in range(rows)]
    return [EQUAL] * rows if equal else uneven


def prepared_run(folder: Path, tokens: list[int]) -> Any:
    """The planned recipe for rows of so many tokens, one word each."""
    from finetune.recipe import recipe_from
    from finetune.run.prepare import prepare

    texts = [{"text": " ".join(["the"] * count)} for count in tokens]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts), encoding="utf-8")
    return prepare(recipe_from({
        "model_name_or_path": "tiny", "dataset": {"path": str(folder / "rows.jsonl")}, "gpu": "cpu", "lora_r": RANK,
        "lora_alpha": 2.0 * RANK, "target_modules": "all-linear", "effective_batch_size": BATCH, "num_train_epochs": 1.0,
        "learning_rate": 1e-4, "eval_steps": 0, "save_steps": 0, "output_dir": str(folder / "run"),
    }))  # fmt: skip


def pair(prepared: Any, number: int, tokens: int) -> float:
    """Seconds of TRL over ours, and a line about them. Number 0 is the warm-up."""
    seconds = {ours: train(prepared, ours) for ours in ((False, True) if number % 2 else (True, False))}
    ratio = seconds[False] / seconds[True]
    rates = ", ".join(f"{name} {tokens / seconds[ours]:,.0f} tokens/s" for ours, name in ((False, "TRL"), (True, "finetune")))
    print(f"pair {number}: {rates}, ratio {ratio:.3f}{'' if number else '  (warm-up, not counted)'}", flush=True)
    return ratio


def train(prepared: Any, ours: bool) -> float:
    """Processor seconds of trainer.train(), without loading."""
    from finetune.run.prepare import create_run
    from finetune.run.worker import Worker

    run = create_run(prepared)
    trainer = Worker(run)._build()[0] if ours else plain_trainer(run)
    began = time.process_time()
    trainer.train()
    return time.process_time() - began


def plain_trainer(run: Any) -> Any:
    """TRL's SFTTrainer with its defaults, on the same model and rows."""
    from datasets import load_from_disk
    from peft import LoraConfig
    from transformers import AutoTokenizer, set_seed
    from trl import SFTConfig, SFTTrainer

    from finetune.model.build import build_base
    from finetune.model.transformers_config import load_config
    from finetune.planner.plan import read_plan

    settings = read_plan(run.plan).settings
    set_seed(settings.seed)
    defaults = SFTConfig(
        output_dir=str(run.path / "trl"), num_train_epochs=1, learning_rate=settings.learning_rate, seed=settings.seed,
        bf16=False, use_cpu=True, report_to=[], save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    return SFTTrainer(
        model=build_base(settings, load_config(settings), device="cpu", weights=True),
        args=defaults,
        train_dataset=load_from_disk(str(Path(run.data) / "train")).select_columns(["input_ids"]),
        processing_class=AutoTokenizer.from_pretrained(str(Path(run.data) / "tokenizer")),
        peft_config=LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM"),
    )


if __name__ == "__main__":
    main()
