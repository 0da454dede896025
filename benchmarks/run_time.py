"""Whether the range for a run's length covers further runs on this machine: python benchmarks/run_time.py [RUNS] [OTHERS]

Short runs of the bundled task, of which the first only measures, beside whatever else uses the machine and up to OTHERS busy
processes, of which some start and end every few seconds. Prints for each further
run the range by the first run alone, the range by all before it, and its real length; the range for the steps that are left
after ten, and what they took; and the run's CPU seconds. At the end: how many were inside, and the median of
high / low. FINETUNE_CACHE should name an empty folder.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from finetune.events import Step, read_events
from finetune.planner.history import read_history
from finetune.planner.plan import Plan
from finetune.planner.run_time import RunTime, run_time, slowdowns_by_load
from finetune.recipe import load_recipe
from finetune.run import control
from finetune.run.directory import RunDirectory
from finetune.run.pace import FEWEST_STEPS, Pace
from finetune.run.prepare import create_run, prepare
from finetune.system import let_waiting_threads_sleep, load_averages

FIRST, ALL, TEN = "the first run alone", "all runs before", "ten steps of the run itself"
Range = tuple[float, float]


def by_first_run(plan: Plan) -> RunTime | None:
    """The range that a plan has when only the first whole run on this machine is known."""
    first = read_history(plan.card.name).measured_runs[:1]
    slowdowns = slowdowns_by_load(load_averages(), os.cpu_count() or 1)
    return run_time(plan.workload_s, plan.settings.model_name_or_path, first, slowdowns)


def after_ten_steps(run: RunDirectory) -> tuple[Range, float]:
    """The range of the seconds that are left after ten steps, and those that it took to the last step."""
    events = read_events(run.events)
    steps = [event for event in events if isinstance(event, Step)]
    left = Pace.of(events[: events.index(steps[FEWEST_STEPS - 1]) + 1]).left
    assert left is not None and left.low_s is not None and left.high_s is not None
    return (left.low_s, left.high_s), (steps[-1].time_s or 0.0) - (steps[FEWEST_STEPS - 1].time_s or 0.0)


@contextmanager
def other_programs(most: int) -> Iterator[None]:
    """Up to `most` processes that use a CPU each, another number of them every 5 to 25 s."""
    rng, ended = random.Random(1), threading.Event()

    def change() -> None:
        while not ended.is_set():
            processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(rng.randint(0, most))]
            ended.wait(rng.uniform(5, 25))
            for process in processes:
                process.kill()
                process.wait()

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def train(prepared: object) -> tuple[RunDirectory, float]:
    """Train a run to its end; its directory, and seconds from its start to its end."""
    run = create_run(prepared)  # type: ignore[arg-type]
    began_s = time.monotonic()
    control.start(run)
    control.wait(run, 3600)
    return run, time.monotonic() - began_s


def main() -> None:
    """Train and print."""
    let_waiting_threads_sleep()  # as the command line does
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    random.seed(0)
    outcomes: dict[str, list[tuple[Range, float]]] = {FIRST: [], ALL: [], TEN: []}
    others = other_programs(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    with tempfile.TemporaryDirectory() as folder, others:
        for number in range(1 + runs):
            overrides = [
                f"max_steps={random.randint(40, 120)}", "dataset.max_rows=100", "dataset.test_split_size=10", "max_length=256",
                "effective_batch_size=2", "per_device_train_batch_size=2", f"eval_steps={random.choice((5, 10, 20))}",
                f"output_dir={Path(folder) / str(number)}", "sample_answers=0",
            ]  # fmt: skip
            prepared = prepare(load_recipe("tiny-cpu", overrides))
            ranges, loads = {FIRST: by_first_run(prepared.plan), ALL: prepared.plan.run_time}, load_averages()
            run, took_s = train(prepared)
            left, left_s = after_ten_steps(run)
            row = {"steps": prepared.plan.total_steps, "took_s": took_s, "left": left, "left_s": left_s, "loads": loads}
            measured = vars(read_history(prepared.plan.card.name).measured_runs[-1])
            shown = {source: entry and (entry.low_s, entry.high_s) for source, entry in ranges.items()}
            print(json.dumps({**row, **measured, **shown}), flush=True)
            if number:
                outcomes[TEN].append((left, left_s))
                for source, entry in ranges.items():
                    assert entry is not None
                    outcomes[source].append(((entry.low_s, entry.high_s), took_s))
    for source, entries in outcomes.items():
        inside = sum(begin <= seconds <= end for (begin, end), seconds in entries)
        width = statistics.median(end / begin for (begin, end), _ in entries)
        print(f"by {source}: {inside} of {runs} are inside their range, high / low {width:.1f}")


if __name__ == "__main__":
    main()
