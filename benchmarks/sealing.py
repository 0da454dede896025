"""What sealing adds to a durable save of a checkpoint with 100 MB of adapters: paired saves, with and without.

    python benchmarks/sealing.py --pairs 7

A save counts as durable when every file of it is synced to the disk. Plain: TRL's save, then a sync of each file. Sealed: the
same save, then `finetune.run.seal.seal`, which hashes, syncs, writes the manifest and renames. Target: median ratio <= 1.03.
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
    """Train one step, then save in pairs whose order changes, after one pair that isn't counted."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pairs", type=int, default=7)
    arguments.add_argument("--place", default=None, help="A folder on the disk to measure; a temporary one otherwise.")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=options.place) as place:
        trainer = trained_trainer(Path(place) / "run")
        folder = Path(place) / "saves"
        ratios = []
        for pair in range(options.pairs + 1):
            order = (False, True) if pair % 2 else (True, False)
            seconds = {sealed: save(trainer, folder, sealed) for sealed in order}
            ratio = seconds[True] / seconds[False]
            note = "  (warm-up, not counted)" if pair == 0 else ""
            print(
                f"pair {pair}: durable {seconds[False]:.2f} s, sealed {seconds[True]:.2f} s, ratio {ratio:.4f}{note}",
                flush=True,
            )
            if pair:
                ratios.append(ratio)
    print(f"median ratio {statistics.median(ratios):.4f} over {len(ratios)} pairs")


def trained_trainer(place: Path) -> Any:
    """The run's own trainer after one step, so that the optimizer has its states."""
    from finetune.recipe import load_recipe
    from finetune.run.prepare import create_run, prepare
    from finetune.run.worker import Worker

    overrides = ["max_steps=1", "save_steps=0", "eval_steps=0", f"lora_r={RANK}", "lora_alpha=16", "dataset.max_rows=32"]
    worker = Worker(create_run(prepare(load_recipe("tiny-cpu", [*overrides, f"output_dir={place}"]))))
    trainer, _ = worker._build()
    trainer.train()
    return trainer


def save(trainer: Any, folder: Path, sealed: bool) -> float:
    """Seconds of one durable save."""
    from transformers import Trainer

    from finetune.run.seal import seal

    shutil.rmtree(folder, ignore_errors=True)
    os.sync()
    trainer._get_output_dir = lambda trial: str(folder)
    began = time.perf_counter()
    Trainer._save_checkpoint(trainer, trainer.model, None)
    written = folder / f"checkpoint-{trainer.state.global_step}"
    if sealed:
        seal(written, folder / "sealed", trainer.state.global_step, {})
    else:
        for path in (*written.rglob("*"), written, folder):
            sync(path)
    took_s = time.perf_counter() - began
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    adapter = next(folder.rglob("adapter_model.safetensors")).stat().st_size
    assert adapter > 100e6 and size > 300e6, (adapter, size)
    return took_s


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


if __name__ == "__main__":
    main()
