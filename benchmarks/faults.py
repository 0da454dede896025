"""Random kills and full disks: does a result ever differ silently?

    python -m benchmarks.faults [--seed 0] [--minutes 60] [--only TEXT] [--cases 200]

Prints a table of all cases by outcome. The exit status is 1 if a result differed without a message, or a run ended in an
internal error or a traceback. Runs are tiny, on a CPU, started as `finetune run` and `finetune resume` start them.

A case is a SIGKILL that hits a living process, at a random moment of a run or a resume: the training process, its supervisor,
or both. A run is killed one to eight times, then trained to its end; its result must equal an undisturbed run's to the bit. A
disk, a small tmpfs, fills up at a random moment: the run must pause, and after space is freed end with the same bits.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from finetune.errors import FINISHED, DiskFull
from finetune.events import Result, Step, read_events
from finetune.recipe import load_recipe
from finetune.run import control
from finetune.run.directory import RunDirectory
from finetune.run.prepare import create_run, prepare
from finetune.run.seal import newest_verified
from finetune.run.state import RunState, living_processes, read_state

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from warm import CLIENT, start_server  # noqa: E402 - the tests' server: a supervisor and its worker are forks of it

_MOST_KILLS = 8
_ENDS_WITHIN_S = 120
_SHORT = (
    "max_steps=8", "save_steps=2", "effective_batch_size=2", "per_device_train_batch_size=1", "dataset.max_rows=16",
    "save_total_limit=3", "lora_r=4", "lora_alpha=8", "eval_steps=0", "sample_answers=0", "lora_dropout=0.1",
)  # fmt: skip
#: float32 and few adapters: a kill costs less CPU time.
_SMALL = ("load_in_4bit=false", "target_modules=[q_proj,v_proj]")
_SCHEDULES = {
    "whole epochs": ("max_steps=null", "num_train_epochs=2", "dataset.max_rows=8"),
    "inside an epoch": ("max_steps=6",),
    "constant schedule": ("max_steps=6", "lr_scheduler_type=constant"),
    "offloaded layers": (
        "activation_checkpointing=true", "activation_checkpointing_every_n_layers=1", "layer_offloading=nvme",
        "offloaded_layers=2",
    ),
}  # fmt: skip
_OVERFITTING = {"early stop": ("early_stopping_patience=2",), "best step": ()}
_OF_CHECKPOINT = ("optimizer.pt", "scheduler.pt", "rng_state*.pth", "adapter_model.safetensors")
_DISK_BYTES, _BLOCK = 24 * 2**20, 4096


@dataclass
class Tally:
    """Cases of one kind by their outcome. `failures` has a line for each case that ended otherwise than it must."""

    kind: str
    target: int
    until: float
    outcomes: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether more cases are wanted and there is time for them."""
        return self.outcomes.total() < self.target and time.monotonic() < self.until

    def fail(self, case: str) -> None:
        """Count a case that ended otherwise than it must."""
        self.outcomes["FAILED"] += 1
        self.failures.append(f"{self.kind}: {case}")

    def row(self) -> str:
        """One line of the table."""
        outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(self.outcomes.items()))
        return f"| {self.kind} | {self.outcomes.total()} of {self.target} | {outcomes} |"


def main() -> int:
    """Run the cases; returns 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--only", default="", help="run only the rows of the table with this text")
    parser.add_argument("--cases", type=int, help="number of cases of each row")
    options = parser.parse_args()
    rows = [row for row in ROWS if options.only in row[0]]
    began, tallies = time.monotonic(), []
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    os.environ |= {"FINETUNE_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "WARM_PYTHON": str(folder / "socket")}
    os.environ["PATH"] = (
        f"{Path(sys.executable).resolve().parent}{os.pathsep}{os.environ['PATH']}"  # its python3 starts quickly
    )
    start_server(folder / "socket", os.getpid())
    sys.executable = CLIENT
    for index, (title, target, run_cases) in enumerate(rows):
        now = time.monotonic()
        until = now + (began + options.minutes * 60 - now) / (len(rows) - index)
        tally = Tally(title, options.cases or target, until)
        (folder / str(index)).mkdir()
        run_cases(random.Random(f"{options.seed} {title}"), tally, folder / str(index))
        tallies.append(tally)
        print(tally.row(), flush=True)
    print("\n| faults | cases | outcomes |\n|---|---|---|", *(tally.row() for tally in tallies), sep="\n")
    untried = [f"{tally.kind}: no case was tried in time. Give it more --minutes" for tally in tallies if not tally.outcomes]
    failures = [line for tally in tallies for line in tally.failures] + untried
    print(*failures, sep="\n")
    if not failures:
        shutil.rmtree(folder)
    return bool(failures)


def new_run(folder: Path, *overrides: str) -> RunDirectory:
    """A run of a few steps on a CPU that has not been started."""
    return create_run(prepare(load_recipe("tiny-cpu", [*_SHORT, *overrides, f"output_dir={folder}"])))


def overfitting_rows(folder: Path) -> tuple[str, ...]:
    """Write rows whose held-out loss falls and then rises, as held-out answers differ; returns their settings."""
    chance = random.Random(1)
    for split, answer in (("train", "red"), ("held", "blue")):
        rows = [{"prompt": f"The {split} box {chance.randrange(10**6)} is ", "completion": answer} for _ in range(8)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return (
        f"dataset.path={folder}/train.jsonl", f"dataset.eval_path={folder}/held.jsonl", "max_steps=12", "eval_steps=2",
        "save_steps=2", "effective_batch_size=8", "per_device_train_batch_size=8", "learning_rate=4e-3",
        "lr_scheduler_type=constant", "save_total_limit=1",
    )  # fmt: skip


def copy_of(unstarted: RunDirectory, path: Path) -> RunDirectory:
    """A copy of a run that has not been started."""
    return RunDirectory(Path(shutil.copytree(unstarted.path, path)))


def ended(run: RunDirectory) -> RunState:
    """The state of a run when its processes have ended. Raises ValueError if they do not."""
    if not control.wait(run, _ENDS_WITHIN_S):
        raise ValueError(f"alive after {_ENDS_WITHIN_S} s")
    return read_state(run)


def train(run: RunDirectory) -> float:
    """Train to the end; returns the seconds that it took. Raises ValueError if the run does not finish."""
    began = time.monotonic()
    control.start(run)
    state = ended(run)
    if state.exit_code != FINISHED:
        raise ValueError(
            f"{state.state}, exit {state.exit_code}: {state.message}; {run.log.read_text(encoding='utf-8')[-400:]}"
        )
    return time.monotonic() - began


def result_of(run: RunDirectory) -> dict[str, Any]:
    """All that must be equal in a run that was killed: adapters, newest checkpoint, result, loss by step, the last step.

    Raises ValueError for a step that shows another loss when it is trained again.
    """
    losses: dict[int, Any] = {}
    events = read_events(run.events)
    for event in events:
        if isinstance(event, Step) and losses.setdefault(event.step, event.loss) != event.loss:
            raise ValueError(f"step {event.step} has loss {event.loss} and {losses[event.step]}")
    newest = newest_verified(run.checkpoints)[0]
    adapters = run.path.glob("adapter/adapter_model.safetensors")
    paths = [*adapters, *(path for pattern in _OF_CHECKPOINT for path in (newest.path.glob(pattern) if newest else ()))]
    results = [dataclasses.replace(event, time_s=None) for event in events if isinstance(event, Result)]
    hashes = {str(path.relative_to(run.path)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    return {"files": hashes, "result": results[-1:], "losses": losses, "steps": max(losses, default=0)}


def kill_cases(kind: str, rng: random.Random, tally: Tally, folder: Path) -> None:
    """Kill runs of one kind until the tally has its cases or time is up."""
    overrides = _SCHEDULES.get(kind) or (*overfitting_rows(folder), *_OVERFITTING[kind])
    unstarted = new_run(folder / "unstarted", *_SMALL, *overrides)
    whole = copy_of(unstarted, folder / "whole")
    lasts_s, expected = train(whole), result_of(whole)
    if (kind in _OVERFITTING) != any(result.step != result.last_step for result in expected["result"]):
        tally.fail("its best step is not where it was meant to be")
        return
    number = 0
    while tally.goes_on:
        number += 1
        run, kills = copy_of(unstarted, folder / f"run-{number}"), list[str]()
        try:
            for _ in range(rng.randint(1, _MOST_KILLS)):
                after_s = rng.uniform(0, lasts_s)
                if not _kill(run, after_s, rng):
                    break
                kills.append(f"after {after_s:.3f} of {lasts_s:.3f} s")
            if read_state(run).exit_code != FINISHED:
                train(run)
            result = result_of(run)
            problem = ", ".join(f"other {name}" for name in expected if expected[name] != result[name])
        except ValueError as error:
            problem = str(error)
        if problem:
            tally.fail(f"run {number} (kept in {run.path}), killed {'; '.join(kills)}: {problem}")
            continue
        tally.outcomes["equal"] += len(kills)
        shutil.rmtree(run.path)


def _kill(run: RunDirectory, after_s: float, rng: random.Random) -> bool:
    """Start a run; kill its supervisor, its worker or both. False when the run has finished."""
    control.start(run)
    time.sleep(after_s)
    for role in rng.choice((["supervisor"], ["worker"], ["supervisor", "worker"], ["worker", "supervisor"])):
        if record := living_processes(run).get(role):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(record["pid"]), signal.SIGKILL)
    state = ended(run)
    if state.state == "failed" and "was killed" not in (state.message or ""):
        raise ValueError(f"{state.state}: {state.message}")
    return state.state != "finished"


def disk_cases(rng: random.Random, tally: Tally, folder: Path) -> None:
    """Fill the disk during runs until the tally has its cases or time is up."""
    unstarted, disk = new_run(folder / "unstarted"), folder / "disk"
    whole = copy_of(unstarted, folder / "whole")
    lasts_s, expected = train(whole), result_of(whole)
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        print("disk: a tmpfs can't be mounted here. Run as root")
        return
    try:
        while tally.goes_on:
            run = copy_of(unstarted, disk / "run")
            control.start(run)
            after_s, free_bytes = rng.uniform(0, lasts_s), rng.choice((0, rng.randrange(2_000_000)))
            time.sleep(after_s)
            _fill(disk / "ballast", free_bytes)
            try:
                state = ended(run)
                (disk / "ballast").unlink()
                problem = f"{state.state}: {state.message}" if state.exit_code not in (FINISHED, DiskFull.exit_code) else ""
                if not problem and state.exit_code != FINISHED:
                    train(run)
                problem = problem or ("" if result_of(run) == expected else "another result")
            except ValueError as error:
                problem = str(error)
            if problem:
                tally.fail(f"{free_bytes} bytes left after {after_s:.2f} of {lasts_s:.2f} s: {problem}")
            else:
                tally.outcomes["not noticed, equal" if state.exit_code == FINISHED else "paused, then equal"] += 1
            for process in living_processes(run).values():
                os.kill(int(process["pid"]), signal.SIGKILL)
            shutil.rmtree(run.path)
            (disk / "ballast").unlink(missing_ok=True)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _fill(path: Path, free_bytes: int) -> None:
    """Fill the disk but for some bytes."""
    with path.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(bytes(_BLOCK))
        file.truncate(max(0, file.tell() - free_bytes))


#: Rows of the table: a title, the usual number of cases, and what runs them.
ROWS: list[tuple[str, int, Callable[[random.Random, Tally, Path], None]]] = [
    *((f"kills, {kind}", 200, functools.partial(kill_cases, kind)) for kind in (*_SCHEDULES, *_OVERFITTING)),
    ("disks that fill", 100, disk_cases),
]

if __name__ == "__main__":
    sys.exit(main())
