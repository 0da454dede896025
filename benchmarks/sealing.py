"""Seconds that saving 100 MB of adapters (and 200 MB of optimizer states) blocks training: TRL's save against the run's.

    python benchmarks/sealing.py --pairs 7

Plain: transformers' own save, not synced to disk. Sealed: the run's save, whose hashing and syncing run while training
continues; they are waited for between the saves. Target: median ratio <= 1.03. The seconds of the seal are printed, too.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
#: 69 kB of fp32 adapters a rank for the bundled model.
RANK = 1450


def main() -> None:
    """Train one step, then save in pairs of alternating order, after a warm-up pair."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=7)
    arguments.add_argument("--place", default=None, help="A folder on the disk to measure; a temporary one otherwise.")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=options.place) as folder:
        trainer = trained_trainer(Path(folder) / "run")
        ratios = []
        for pair in range(options.pairs + 1):
            order = (False, True) if pair % 2 else (True, False)
            seconds = {sealed: save(trainer, sealed) for sealed in order}
            ratio = seconds[True] / seconds[False]
            note = "  (warm-up, not counted)" if pair == 0 else ""
            print(
                f"pair {pair}: plain {seconds[False]:.2f} s, sealed {seconds[True]:.2f} s, ratio {ratio:.4f}{note}",
                flush=True,
            )
            if pair:
                ratios.append(ratio)
    print(f"median ratio {statistics.median(ratios):.4f} over {len(ratios)} pairs")


def trained_trainer(folder: Path) -> Any:
    """The run's trainer after one step, with optimizer states."""
    from finetune.recipe import load_recipe
    from finetune.run.prepare import create_run, prepare
    from finetune.run.worker import Worker

    overrides = ["max_steps=1", "save_steps=0", "eval_steps=0", f"lora_r={RANK}", "lora_alpha=16", "dataset.max_rows=32"]
    worker = Worker(create_run(prepare(load_recipe("tiny-cpu", [*overrides, f"output_dir={folder}"]))))
    trainer, _ = worker._build()
    trainer.train()
    return trainer


def save(trainer: Any, sealed: bool) -> float:
    """Seconds that one save blocks the training loop."""
    from transformers import Trainer

    shutil.rmtree(trainer.run.checkpoints, ignore_errors=True)
    os.sync()
    began = time.perf_counter()
    if sealed:
        trainer._save_checkpoint(trainer.model, None)
    else:
        Trainer._save_checkpoint(trainer, trainer.model, None)
    took_s = time.perf_counter() - began
    began = time.perf_counter()
    trainer.finish_sealing()
    if sealed:
        print(f"  sealed {time.perf_counter() - began:.2f} s after the save returned")
    adapter = next(trainer.run.checkpoints.rglob("adapter_model.safetensors")).stat().st_size
    assert adapter > 100e6, adapter
    return took_s


if __name__ == "__main__":
    main()
