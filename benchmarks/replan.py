"""Seconds that the page waits for a new plan after a slider moves, with the page's own planner process.

    python benchmarks/replan.py --moves 40 --rest 20

Starts with an empty cache, plans a 7B model for an RTX 4090, rests (the process plans ahead meanwhile), then moves one slider
at a time, pausing half a second to two seconds: each from the first plan (`single`), then from the last move's (`walk`).
Target: <= 1 s at the 95th percentile.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from app.planning.planner import Planner
from app.workspace import Workspace

RECIPE = "model_name_or_path: Qwen/Qwen2.5-7B-Instruct\ndataset: support\ngpu: rtx-4090\n"
START = {"lora_r": 16, "max_length": 2048, "effective_batch_size": 16}
CHOICES = {
    "lora_r": (8, 16, 32, 64, 128),
    "max_length": (512, 1024, 1536, 2048, 3072, 4096),
    "effective_batch_size": (4, 8, 16, 32, 64),
}


def main() -> None:
    """Print the seconds of each move and the two summaries."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--moves", type=int, default=40)
    arguments.add_argument("--rest", type=float, default=20.0, help="seconds between the first plan and the first move")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["FINETUNE_CACHE"] = f"{temporary}/cache"
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        planner = Planner(Workspace(Path(temporary), Path(temporary) / "runs"))
        print(f"first plan, libraries not loaded yet: {ask(planner, START):.2f} s", flush=True)
        time.sleep(options.rest)
        for kind in ("single", "walk"):
            chosen, now, waits = random.Random(0), dict(START), []
            for _ in range(options.moves):
                name = chosen.choice(list(CHOICES))
                now = {**(START if kind == "single" else now), name: chosen.choice(CHOICES[name])}
                waits.append(ask(planner, now))
                print(f"{kind}: {name}={now[name]} {waits[-1]:.2f} s", flush=True)
                time.sleep(chosen.uniform(0.5, 2.0))
            waits.sort()
            worst = waits[int(0.95 * len(waits))]
            print(f"{kind}: median {statistics.median(waits):.2f} s, 95th percentile {worst:.2f} s over {len(waits)} moves")
        planner.close()


def ask(planner: Planner, settings: dict[str, Any]) -> float:
    """Seconds until the plan for these settings is ready."""
    began = time.perf_counter()
    planner.ask("plan", recipe=RECIPE + "".join(f"{name}: {value}\n" for name, value in settings.items()), free_bytes=None)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
