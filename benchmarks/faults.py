"""Random kills and full disks: does a result ever differ silently?

    python -m benchmarks.faults [--seed 0] [--minutes 60] [--kinds kills,disk] [--cases 200]

Prints a table of all cases by outcome. The exit status is 1 if a result differed without a message, or a run ended in an
internal error or a traceback. Runs are tiny, on a CPU, in forks of this process.

A case is a SIGKILL that hits a living process, at a random moment or file operation of a run or a resume. A run is killed one
to eight times, then trained to its end; its result must equal an undisturbed run's to the bit. Some attempts start as `finetune
resume` starts them, and their supervisor is killed, too. A disk, a small tmpfs, fills up at a random moment: the run must
pause, and after space is freed end with the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.fault_runs import (
    SMALL,
    Tally,
    fresh_copy,
    new_run,
    overfitting_rows,
    result_of,
    small_base,
    start_training,
    train,
    work_of,
)
from benchmarks.forks import import_worker, wait_for, write_to
from finetune.errors import DiskFull
from finetune.run import control
from finetune.run.directory import RunDirectory
from finetune.run.state import living_processes, read_state

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from killed import forked  # noqa: E402 - the tests' helper, which kills at an operation of a file
from warm import CLIENT, start_server  # noqa: E402 - so that a supervisor's processes are forks, too

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


_DISK_BYTES, _BLOCK = 24 * 2**20, 4096


def main() -> int:
    """Run the cases; returns 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--kinds", default=",".join(ROWS))
    parser.add_argument("--only", default="", help="run only the rows of the table with this text")
    parser.add_argument("--cases", type=int, help="number of cases of each row")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    if unknown := sorted({*kinds} - {*ROWS}):
        parser.error(f"--kinds {','.join(unknown)}: one of {', '.join(ROWS)}")
    rows = [row for kind in kinds for row in ROWS[kind] if options.only in row[0]]
    began, tallies = time.monotonic(), []
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    os.environ["FINETUNE_CACHE"] = str(folder / "cache")
    import_worker()
    for index, (title, target, run_cases) in enumerate(rows):
        now = time.monotonic()
        until = now + (began + options.minutes * 60 - now) / (len(rows) - index)
        tally = Tally(title, options.cases or target, until)
        (folder / str(index)).mkdir()
        run_cases(random.Random(f"{options.seed} {title}"), tally, folder / str(index))
        tallies.append(tally)
        print(tally.row(), flush=True)
    code = report(tallies)
    if not code:
        shutil.rmtree(folder)
    return code


def report(tallies: list[Tally]) -> int:
    """Print the table and the failures; returns 1 if there are failures."""
    print("\n| faults | cases | outcomes |\n|---|---|---|")
    for tally in tallies:
        print(tally.row())
    untried = [f"{tally.kind}: no case was tried in time. Give it more --minutes" for tally in tallies if not tally.outcomes]
    failures = [line for tally in tallies for line in tally.failures] + untried
    for line in failures:
        print(line)
    return 1 if failures else 0


def kill_cases(kind: str, rng: random.Random, tally: Tally, folder: Path) -> None:
    """Kill runs of one kind until the tally has its cases or time is up."""
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
    start_server(path, os.getpid())
    os.environ["WARM_PYTHON"], sys.executable = str(path), CLIENT
    os.environ["PATH"] = f"{Path(interpreter).resolve().parent}{os.pathsep}{os.environ['PATH']}"  # whose python3 starts quickly
    try:
        yield
    finally:
        sys.executable = interpreter


def _kill(run: RunDirectory, rng: random.Random, processes: int, lasts_s: float, operations: str, kills: list[str]) -> None:
    """Kill a run and its resumes until an attempt ends; adds a line to `kills` for each. Raises ValueError if one fails."""
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
        write_to(run.log)
        return work_of(run)()

    return work


def _kill_after(after_s: float, pids: list[int], rng: random.Random) -> bool:
    """Kill all processes in random order, as a launcher ends the ranks of a lost rank. Returns whether a kill hit."""
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


def disk_cases(rng: random.Random, tally: Tally, folder: Path) -> None:
    """Fill the disk during runs until the tally has its cases or time is up."""
    unstarted, disk = new_run(folder / "unstarted"), folder / "disk"
    whole = fresh_copy(unstarted, folder / "whole")
    began = time.monotonic()
    if code := train(whole):
        tally.fail(f"on a disk with space: exit {code}")
        return
    lasts_s, expected = time.monotonic() - began, result_of(whole)
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        print("disk: a tmpfs can't be mounted here. Run as root")
        return
    try:
        while tally.goes_on:
            run = fresh_copy(unstarted, disk / "run")
            (pid,) = start_training(run)
            after_s, free_bytes = rng.uniform(0, lasts_s), rng.choice((0, rng.randrange(2_000_000)))
            time.sleep(after_s)
            _fill(disk / "ballast", free_bytes)
            code = wait_for(pid)
            (disk / "ballast").unlink()
            problem = f"exit {code}" if code not in (0, DiskFull.exit_code) else ""
            if not problem and (resumed := train(run)):
                problem = f"resume: exit {resumed}"
            if not problem and result_of(run) != expected:
                problem = "another result"
            if problem:
                tally.fail(f"{free_bytes} bytes left after {after_s:.2f} of {lasts_s:.2f} s: {problem}; {_last_lines(run.log)}")
            else:
                tally.outcomes["paused, then equal" if code else "not noticed, equal"] += 1
            shutil.rmtree(run.path)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _fill(path: Path, free_bytes: int) -> None:
    """Fill the disk but for some bytes."""
    with path.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(_BLOCK))
        file.truncate(max(0, file.tell() - free_bytes))


def _last_lines(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")[-400:] if path.exists() else "no log"


#: Rows of the table by kind of fault: a title, the usual number of cases, and what runs them.
ROWS: dict[str, list[tuple[str, int, Callable[[random.Random, Tally, Path], None]]]] = {
    "kills": [(f"kills, {name}", 200, functools.partial(kill_cases, name)) for name in KINDS],
    "disk": [("disks that fill", 100, disk_cases)],
}

if __name__ == "__main__":
    sys.exit(main())
