"""SIGKILLs at random moments and file operations of a run, and of its resumes: the result must have the same bits.

A case is one kill that hit a living process. A run is killed one to eight times, then trained to its end and compared with one
that nothing happened to. Some attempts are started as by `finetune resume`, and their supervisor is killed, too.
"""

from __future__ import annotations

import contextlib
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
    in_fork,
    new_run,
    overfitting_rows,
    result_of,
    small_base,
    start_training,
    train,
    wait_for,
    work_of,
)
from finetune.run import control
from finetune.run.state import living_processes, read_state

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from killed import forked  # noqa: E402 - the tests' helper, which kills at an operation of a file
from warm import CLIENT, server  # noqa: E402 - so that a supervisor's processes are forks, too

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.fault_kinds.tally import Tally
    from finetune.run.directory import RunDirectory

_MOST_KILLS = 8
#: Shares of attempts: killed at a file operation; started and killed with their supervisor. The others are killed at a moment.
_AT_OPERATION, _SUPERVISED = 0.4, 0.3
_ENDS_WITHIN_S = 120
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
    with _forked_processes(folder):
        while tally.goes_on:
            number += 1
            run, kills = fresh_copy(unstarted, folder / f"run-{number}"), []
            try:
                _kill(run, rng, processes, lasts_s, operations, kills)
                problem = f"exit {code}" if (code := train(run, processes)) else _difference(expected, run)
            except ValueError as error:
                problem = str(error)
            if problem:
                tally.fail(f"run {number} (kept in {run.path}), killed {'; '.join(kills)}: {problem}")
                continue
            tally.outcomes["equal"] += len(kills)
            shutil.rmtree(run.path)


@contextlib.contextmanager
def _forked_processes(folder: Path) -> Iterator[None]:
    """Have supervisors and the workers that they start be forks of this process, which starts them as new interpreters."""
    path, interpreter = folder / "socket", sys.executable

    def work() -> None:
        sys.argv[1:] = [str(path)]
        server.main()

    warm = in_fork(work, folder / "warm.log")
    os.environ["WARM_PYTHON"], sys.executable = str(path), CLIENT
    os.environ["PATH"] = f"{Path(interpreter).resolve().parent}{os.pathsep}{os.environ['PATH']}"  # whose python3 starts quickly
    try:
        yield
    finally:
        sys.executable = interpreter
        os.kill(warm, signal.SIGKILL)
        wait_for(warm)


def _kill(run: RunDirectory, rng: random.Random, processes: int, lasts_s: float, operations: str, kills: list[str]) -> None:
    """Kill a run and its resumes until one ends; adds a line to `kills` for each. Raises ValueError for one that fails."""
    for _ in range(rng.randint(1, _MOST_KILLS)):
        at, after_s, way = rng.randrange(max(1, len(operations) - 5)), rng.uniform(0, lasts_s), rng.random()
        if processes == 1 and way < _AT_OPERATION:
            moment, hits = f"at file operation {at} of {len(operations)}", _kill_at(at, run)
        elif processes == 1 and way < _AT_OPERATION + _SUPERVISED:
            moment, hits = f"with its supervisor after {after_s:.3f} of {lasts_s:.3f} s", _kill_supervised(after_s, run, rng)
        else:
            moment = f"after {after_s:.3f} of {lasts_s:.3f} s"
            hits = _kill_after(after_s, start_training(run, processes), rng)
        if not hits:
            return
        kills.append(moment)


def _kill_at(at: int, run: RunDirectory) -> bool:
    """Kill a run at a file operation. False when it ended before: a resume has fewer operations."""
    try:
        forked(_quiet(run), run.path, at)
    except AssertionError as error:
        if not str(error).startswith("0 at"):
            raise ValueError(f"exit {error}") from None
        return False
    return True


def _kill_supervised(after_s: float, run: RunDirectory, rng: random.Random) -> bool:
    """Start a run as the command does; kill its supervisor, its worker or both. False when the run has finished."""
    control.start(run)
    time.sleep(after_s)
    for role in rng.choice((["supervisor"], ["worker"], ["supervisor", "worker"], ["worker", "supervisor"])):
        if record := living_processes(run).get(role):
            os.kill(int(record["pid"]), signal.SIGKILL)
    if not control.wait(run, _ENDS_WITHIN_S):
        raise ValueError(f"alive {_ENDS_WITHIN_S} s after a kill")
    state = read_state(run)
    if state.state == "failed" and "was killed" not in (state.message or ""):
        raise ValueError(f"{state.state}: {state.message}")
    return state.state != "finished"


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
    statuses = [wait_for(pid) for pid in order]
    if len(pids) == 1 and statuses[0] not in (0, -signal.SIGKILL):  # of several the others lose their connection
        raise ValueError(f"exit {statuses[0]}")
    return -signal.SIGKILL in statuses


def _difference(expected: dict[str, Any], run: RunDirectory) -> str:
    """What of a run's result is not as expected; empty when all is equal."""
    try:
        result = result_of(run)
    except ValueError as error:
        return str(error)
    return ", ".join(f"other {name}" for name in expected if expected[name] != result[name])
