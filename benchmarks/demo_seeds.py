"""How far the demo's score depends on its seed: the bundled model trained with each, as `make demo` does, and scored.

    python benchmarks/demo_seeds.py                                          # the recipe's seed and three more
    python benchmarks/demo_seeds.py --seeds 1 2 3 4 5 6 7 8 --runs seeds     # interrupted, it continues with the seeds left
    PYTHONPATH=../other-tree python benchmarks/demo_seeds.py --runs before   # another version of this project, same seeds

A seed decides the adapters' first values and the order of the rows; the 120 held-out rows are the same. Two versions that
differ by rounding alone end a seed elsewhere, too: Adam's first steps divide small gradients by their own size. So compare
means over seeds, and a difference of two means with how far the seeds are apart.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

if TYPE_CHECKING:
    from finetune.evaluate.score import Comparison


def main() -> None:
    """Train and score each seed; prints a row for each, and the mean."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[42, 1, 2, 3])
    arguments.add_argument("--runs", type=Path, help="folder in which the runs stay; those that finished are only scored")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        runs = (options.runs or Path(temporary)).absolute()
        print("seed  exact match  held-out loss", flush=True)
        scores = [scored(runs / f"seed-{seed}", seed) for seed in options.seeds]
    right = [sum(score.tuned.exact) for score in scores]
    spread = f", standard deviation {statistics.stdev(right):.2f}" if len(right) > 1 else ""
    losses = statistics.fmean(score.tuned.loss or 0.0 for score in scores)
    print(f"mean  {statistics.fmean(right):.2f} of {scores[0].rows} ({min(right)} to {max(right)}{spread})  {losses:.5f}")


def scored(path: Path, seed: int) -> Comparison:
    """The score of the demo's result with this seed, which is trained unless it is there. Ends the command when that fails."""
    from finetune.evaluate.score import compare
    from finetune.recipe import load_recipe
    from finetune.run.directory import RunDirectory
    from finetune.run.prepare import create_run, prepare
    from finetune.run.worker import Worker

    run = RunDirectory(path)
    if not run.adapter.is_dir():
        if not path.is_dir():
            run = create_run(prepare(load_recipe("tiny-cpu", [f"seed={seed}", f"output_dir={path}"])))
        with contextlib.redirect_stdout(sys.stderr):  # the trainer's losses
            code = Worker(run).main()
        if code:
            sys.exit(code)
    comparison = compare(run)
    print(f"{seed:4}  {sum(comparison.tuned.exact):4} of {comparison.rows}  {comparison.tuned.loss:13.5f}", flush=True)
    return comparison


if __name__ == "__main__":
    main()
