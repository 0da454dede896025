"""Kill a sweep at random moments and go on with it: python benchmarks/sweep_killed.py [KILLS] [FOLDER]

A sweep of the bundled task is killed (SIGKILL) after random seconds: in turn its driver alone, and driver with the arm's
supervisor and training process. Each time it goes on with the same command. At the end it is compared with a sweep that nobody
killed: the same arms dropped at the same steps, and the same held-out losses.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from finetune.run.state import read_processes
from finetune.sweep.sweep import Sweep, open_sweep

OVERRIDES = (
    "learning_rate=4e-4,4e-3,4e-2", "max_steps=120", "eval_steps=30", "save_steps=5", "sample_answers=0", "dataset.max_rows=80",
    "dataset.test_split_size=24", "effective_batch_size=2", "per_device_train_batch_size=2", "lora_r=4", "max_length=256",
)  # fmt: skip


def finetune_sweep(*arguments: str) -> None:
    """Run `finetune sweep`, without its output."""
    command = [sys.executable, "-m", "finetune", "sweep", *arguments]
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)


def kill(sweep: Sweep, *, with_arm: bool) -> bool:
    """Kill the process that drives a sweep, and the processes of its arm; False when it was not running."""
    pids = [process.pid for process in psutil.process_iter(["cmdline"]) if _drives(process, sweep)]
    if with_arm:
        for arm in sweep.facts.arms:
            pids += [int(record["pid"]) for record in read_processes(sweep.run_of(arm)).values()]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return bool(pids)


def _drives(process: psutil.Process, sweep: Sweep) -> bool:
    arguments = process.info["cmdline"] or []
    return "finetune.sweep.driver" in arguments and str(sweep.path) in arguments


def outcome(sweep: Sweep) -> list[tuple[object, ...]]:
    """What must be the same: where each arm was dropped, and its losses."""
    return sorted((str(arm.values), arm.dropped_at, tuple(arm.curve)) for arm in sweep.results())


def run(folder: Path, kills: int) -> bool:
    """Whether the killed sweep ends as the other one."""
    random.seed(0)
    whole, killed = folder / "whole", folder / "killed"
    finetune_sweep("tiny-cpu", *OVERRIDES, f"output_dir={whole}")
    finetune_sweep("tiny-cpu", *OVERRIDES, f"output_dir={killed}", "--detach")
    sweep, moments = open_sweep(killed), 0
    while moments < kills and not sweep.is_finished:
        time.sleep(random.uniform(3, 15))
        if kill(sweep, with_arm=moments % 2 == 1):
            moments += 1
            steps = {arm.name: arm.step for arm in sweep.results()}
            print(f"killed {'driver and arm' if moments % 2 == 0 else 'driver'} at {steps}", flush=True)
        time.sleep(0.5)
        finetune_sweep(str(killed), "--detach")
    while not sweep.is_finished:
        finetune_sweep(str(killed))
    same_outcome = outcome(sweep) == outcome(open_sweep(whole))
    print(f"killed {moments} times; {'the same' if same_outcome else 'ANOTHER'} outcome as undisturbed: {sweep.sentence()}")
    return same_outcome


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(0 if run(Path(sys.argv[2] if len(sys.argv) > 2 else temporary), count) else 1)
