"""Whether the range for a run's length covers further runs on this machine: python benchmarks/run_time.py [RUNS]

Runs of the bundled task with 10 to 40 steps, of which the first two only measure. Prints for each further run its range and its
real length, and at the end how many were inside. FINETUNE_CACHE should name an empty folder.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from finetune.recipe import load_recipe
from finetune.run import control
from finetune.run.prepare import create_run, prepare

FIRST = 2


def main() -> None:
    """Train and print."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    random.seed(0)
    inside = 0
    with tempfile.TemporaryDirectory() as folder:
        for number in range(FIRST + runs):
            overrides = [
                f"max_steps={random.randint(10, 40)}", "dataset.max_rows=200", "dataset.test_split_size=20",
                f"output_dir={Path(folder) / str(number)}", f"eval_steps={random.choice((5, 10, 20))}", "sample_answers=0",
            ]  # fmt: skip
            prepared = prepare(load_recipe("tiny-cpu", overrides))
            run, expected = create_run(prepared), prepared.plan.run_time
            began_s = time.monotonic()
            control.start(run)
            control.wait(run, 3600)
            took_s = time.monotonic() - began_s
            covered = expected is not None and expected.low_s <= took_s <= expected.high_s
            inside += number >= FIRST and covered
            summary = f"{expected.low_s:.0f} to {expected.high_s:.0f} s" if expected else "not measured here"
            print(f"{prepared.plan.total_steps} steps: {summary}, took {took_s:.0f} s", flush=True)
    print(f"{inside} of {runs} further runs are inside their range")


if __name__ == "__main__":
    main()
