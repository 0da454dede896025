"""SIGKILLs at random moments and file operations of a run, and of its resumes: the result must have the same bits.

A case is one kill that hit a living process. A run is killed one to eight times, then trained to its end and compared with one
that nothing happened to.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.fault_kinds.runs import (
    SMALL,
    fresh_copy,
    new_run,
    overfitting_rows,
    result_of,
    small_base,
    start_training,
    train,
    wait_for,
    work_of,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from killed import forked  # noqa: E402 - the tests' helper, which kills at an operation of a file

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.fault_kinds.tally import Tally
    from finetune.run.directory import RunDirectory

_MOST_KILLS = 8
_SCHEDULES = {
    "whole epochs": ("max_steps=null", "num_train_epochs=2", "dataset.max_rows=8"),
    "inside an epoch": ("max_steps=6",),
    "constant schedule": ("max_steps=6", "lr_scheduler_type=constant"),
    "offloaded layers": (
        "activation_checkpointing=true", "activation_checkpointing_every_n_layers=1", "layer_offloading=nvme",
        "offloaded_layers=2",
    ),
    "two processes": ("launch.num_processes=2", "max_steps=6"),
}  # fmt: skip
_OVERFITTING = {"early stop": ("early_stopping_patience=2",), "best step": ()}
KINDS = (*_SCHEDULES, *_OVERFITTING)


def kill_cases(kind: str, rng: random.Random, tally: Tally, folder: Path) -> None:
    """Kill runs of one kind until the tally has its cases or the time is over."""
    overrides = _SCHEDULES.get(kind) or (*overfitting_rows(folder), *_OVERFITTING[kind])
    processes = 2 if kind == "two processes" else 1
    base = small_base(folder / "base")
    unstarted = new_run(folder / "unstarted", *SMALL, f"model_name_or_path={base}", *overrides)
    whole = fresh_copy(unstarted, folder / "whole")
    began = time.monotonic()
    if code := train(whole, processes):
        tally.fail(f"without a kill: exit {code}, see {whole.log}")
        return
    lasts_s, expected = time.monotonic() - began, result_of(whole)
    if (kind in _OVERFITTING) != (whole.path / "adapter-last").is_dir():
        tally.fail("its best step is not where it was meant to be")
        return
    operations = "" if processes > 1 else forked(_quiet(fresh_copy(unstarted, folder / "traced")), folder / "traced")
    number = 0
    while tally.goes_on:
        number += 1
        run = fresh_copy(unstarted, folder / f"run-{number}")
        kills = _killed_run(run, rng, processes, lasts_s, operations)
        code = train(run, processes)
        problem = f"exit {code}" if code else _difference(expected, run)
        if problem:
            tally.fail(f"run {number} (kept in {run.path}), killed {'; '.join(kills)}: {problem}")
            continue
        tally.outcomes["equal"] += len(kills)
        shutil.rmtree(run.path)


def _killed_run(run: RunDirectory, rng: random.Random, processes: int, lasts_s: float, operations: str) -> list[str]:
    """Kill a run and its resumes until one of them ends; returns a line for each kill."""
    kills: list[str] = []
    for _ in range(rng.randint(1, _MOST_KILLS)):
        if operations and rng.random() < 0.5:
            at = rng.randrange(max(1, len(operations) - 5))
            try:
                forked(_quiet(run), run.path, at)
            except AssertionError:  # a resume has fewer operations: it ended
                break
            kills.append(f"at file operation {at} of {len(operations)}")
            continue
        after_s = rng.uniform(0, lasts_s)
        if not _kill_after(after_s, start_training(run, processes), rng):
            break
        kills.append(f"after {after_s:.3f} of {lasts_s:.3f} s")
    return kills


def _quiet(run: RunDirectory) -> Callable[[], int]:
    """The run's training, as work of a fork that writes into the run's log."""

    def work() -> int:
        number = os.open(run.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(number, 1)
        os.dup2(number, 2)
        return work_of(run)()

    return work


def _kill_after(after_s: float, pids: list[int], rng: random.Random) -> bool:
    """Kill one process or all of them; the others end when the first is gone, as by their launcher. Whether it hit."""
    time.sleep(after_s)
    order = rng.sample(pids, len(pids))
    for pid in order:
        os.kill(pid, signal.SIGKILL)
        time.sleep(rng.choice((0, 0.05)))
    return -signal.SIGKILL in [wait_for(pid) for pid in order]


def _difference(expected: dict[str, Any], run: RunDirectory) -> str:
    """What of a run's result is not as expected; empty when all is equal."""
    try:
        result = result_of(run)
    except ValueError as error:
        return str(error)
    return ", ".join(f"other {name}" for name in expected if expected[name] != result[name])
