"""Whether the range for a run's length covers further runs on this machine: python benchmarks/run_time.py [RUNS]

Runs of the bundled task with 4 to 16 steps, of which the first only measures. Prints for each further run the range by the
first run alone, the range by all before it, and its real length; at the end how many were inside. FINETUNE_CACHE should name
an empty folder.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path

from finetune.planner.history import read_history
from finetune.planner.plan import Plan
from finetune.planner.run_time import RunTime, run_time
from finetune.recipe import load_recipe
from finetune.run import control
from finetune.run.prepare import create_run, prepare


def by_first_run(plan: Plan) -> RunTime | None:
    """The range that a plan has when only the first whole run on this machine is known."""
    first = read_history(plan.card.name).measured_runs[:1]
    return run_time(plan.workload_s, plan.settings.model_name_or_path, first)


def main() -> None:
    """Train and print."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    random.seed(0)
    inside = {"the first run alone": 0, "all runs before": 0}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 + runs):
            overrides = [
                f"max_steps={random.randint(4, 16)}", "dataset.max_rows=100", "dataset.test_split_size=10",
                f"output_dir={Path(folder) / str(number)}", f"eval_steps={random.choice((2, 4, 8))}", "sample_answers=0",
            ]  # fmt: skip
            prepared = prepare(load_recipe("tiny-cpu", overrides))
            ranges = dict(zip(inside, (by_first_run(prepared.plan), prepared.plan.run_time), strict=True))
            run = create_run(prepared)
            began_s = time.monotonic()
            control.start(run)
            control.wait(run, 3600)
            took_s = time.monotonic() - began_s
            for source, expected in ranges.items():
                inside[source] += expected is not None and expected.low_s <= took_s <= expected.high_s
            shown = [
                f"{entry.low_s:.0f} to {entry.high_s:.0f} s" if entry else "not measured here" for entry in ranges.values()
            ]
            print(f"{prepared.plan.total_steps} steps: {', '.join(shown)}, took {took_s:.0f} s", flush=True)
    for source, covered in inside.items():
        print(f"by {source}: {covered} of {runs} further runs are inside their range")


if __name__ == "__main__":
    main()
