"""Run directory: the paths of a run, creation, listing and lookup.

recipe.yaml plan.json events.jsonl log.txt process.json data/ origin/ checkpoints/ adapter/ trackers/
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from finetune.errors import CommandError, DiskFull
from finetune.files import cache_dir, parse_checked, require_unchanged, with_checksum
from finetune.system import WINDOWS, is_locked, rename, take_lock

_UNFINISHED = ".being-made"  # lock file of a run directory under construction; without a lock its process was killed
_REGISTRY = "runs.jsonl"  # in the cache: runs outside runs/, with the folder that started each
_LOCKED_AFTER_S = 60  # seconds after which a living process has taken the lock
_DISK_ERRORS = {
    errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EROFS: "the file system is read-only",
}  # fmt: skip


class _Entry:
    # `run.plan` is RUN/plan.json
    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: RunDirectory, _: type) -> Path:
        return run.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    recipe = _Entry("recipe.yaml")  # the recipe as the user gave it; `finetune run RUN/recipe.yaml` repeats the run
    plan = _Entry("plan.json")  # the plan: every setting resolved, with reasons, and the forecast
    events = _Entry("events.jsonl")  # the events, one JSON object per line
    adjustments = _Entry("adjustments.json")  # settings that retries have changed, and the forecast for them
    finish_request = _Entry("finish-request")  # exists after a request to end the run after its step, with a result
    reserve = _Entry(".reserve")  # disk space that the supervisor frees to write the last events on a full disk
    log = _Entry("log.txt")  # output of the training process
    process = _Entry("process.json")  # process ids with their start times
    arm = _Entry("arm")  # exists in an arm of a sweep: the run keeps the held-out loss of each row
    lock = _Entry("lock")  # lock file of the supervisor
    worker_lock = _Entry("worker.lock")  # lock file of the training process, which may outlive its supervisor
    stop_requests = _Entry("stop")  # requests to stop: a line for each on Windows, elsewhere a line after the first signal
    stop_lock = _Entry("stop.lock")  # lock file of a command that requests a stop
    data = _Entry("data")  # the tokenised rows
    checkpoints = _Entry("checkpoints")  # sealed checkpoints, `checkpoint-<step>`
    base_adapter = _Entry("origin")  # the adapter that training continued from; absent after a start with a new adapter
    adapter = _Entry("adapter")  # the result: adapter, tokenizer and plan; of the best step, with held-out rows
    trackers = _Entry("trackers")  # files of TensorBoard, W&B and Trackio


def create(path: Path, fill: Any) -> RunDirectory:
    """Create a run directory atomically: `fill` a hidden directory, then rename it. Raises DiskFull."""
    building: Path | None = None
    lock = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for lock_file in path.parent.glob(f".*/{_UNFINISHED}"):  # of killed processes
            with contextlib.suppress(FileNotFoundError):  # its process has finished the directory meanwhile
                if time.time() - lock_file.stat().st_mtime > _LOCKED_AFTER_S and not is_locked(lock_file):
                    shutil.rmtree(lock_file.parent, ignore_errors=True)
        building = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
        building.chmod(0o755)
        lock = take_lock(building / _UNFINISHED, 1)
        fill(RunDirectory(building))
        if lock is not None:
            lock.release()  # Windows can't delete or rename an open file
        (building / _UNFINISHED).unlink(missing_ok=True)
        return RunDirectory(_rename_to_free_name(building, path))
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            raise DiskFull(f"output_dir {path}: a part of this path is a file", "Set output_dir to another folder.") from None
        reason = _DISK_ERRORS.get(error.errno or 0, error.strerror or str(error))
        problem = f"the run directory {path} can't be written: {reason}"
        raise DiskFull(problem, "Free some space, or set output_dir to a folder that you can write to.") from None
    finally:
        if lock is not None:
            lock.release()
        if building is not None and building.exists():
            shutil.rmtree(building, ignore_errors=True)


def _rename_to_free_name(building: Path, path: Path) -> Path:
    # a taken name gets -2, -3, ...
    for number in range(1, 10_000):
        target = path if number == 1 else path.with_name(f"{path.name}-{number}")
        if target.exists():
            continue
        try:
            rename(building, target)
        except OSError as error:
            if error.errno in (errno.EEXIST, errno.ENOTEMPTY):  # another process took the name
                continue
            raise
        return target
    raise OSError(errno.EEXIST, "ten thousand runs have this name already")


def register(run: RunDirectory) -> None:
    """Register a run outside runs/ for look-ups by name in this folder."""
    path, here = run.path.absolute(), Path.cwd()
    if path.parent == here / "runs":
        return
    with contextlib.suppress(OSError):  # a full disk or a read-only home: the run is found by its path
        registry = cache_dir() / _REGISTRY
        registry.parent.mkdir(parents=True, exist_ok=True)
        with registry.open("a", encoding="utf-8") as file:  # one short append: lines of two processes don't mix
            file.write(with_checksum(json.dumps({"from": str(here), "run": str(path)})) + "\n")


def runs_from_here(runs: Path = Path("runs")) -> list[RunDirectory]:
    """Return runs below `runs` and runs started in this folder, newest first."""
    here, by_path = str(Path.cwd()), {run.path.absolute(): run for run in list_runs(runs)}
    lines: list[bytes] = []
    with contextlib.suppress(OSError):
        lines = (cache_dir() / _REGISTRY).read_bytes().splitlines()
    for line in lines:
        try:
            entry = parse_checked(line)
            path = Path(entry["run"]) if entry["from"] == here else None
        except (ValueError, TypeError, KeyError):  # a truncated or foreign line
            continue
        if path is not None and path not in by_path and (path / "plan.json").is_file():
            by_path[path] = RunDirectory(path.relative_to(here) if path.is_relative_to(here) else path)
    return _newest_first(list(by_path.values()))


def open_run(source: str | Path, runs: Path = Path("runs")) -> RunDirectory:
    """Return the run at a path, a name, or `latest`. Raises CommandError."""
    if str(source) == "latest":
        newest_first = runs_from_here(runs)
        if not newest_first:
            raise CommandError("there are no runs yet", "Start one: finetune run tiny-cpu")
        return newest_first[0]
    for path in (Path(source), runs / str(source)):
        with contextlib.suppress(OSError):  # a name that is too long
            if (path / "plan.json").is_file():
                return RunDirectory(path)
    for run in runs_from_here(runs):
        if run.path.name == str(source):
            return run
    raise CommandError(f"{str(source)[:200]} is not a run directory (it has no plan.json)", "`finetune runs` lists the runs.")


def require_data(run: RunDirectory) -> None:
    """Raise CommandError when tokenised rows or the tokenizer are missing or changed."""
    fix = f"Start a new run: finetune run {run.recipe}"
    if not ((run.data / "fingerprint").is_file() and (run.data / "tokenizer").is_dir()):
        raise CommandError(f"{run.data} is missing or incomplete", fix)
    require_unchanged(run.data, CommandError, fix)


def list_runs(runs: Path = Path("runs")) -> list[RunDirectory]:
    """Return the runs below a folder, newest first."""
    directories = [RunDirectory(path.parent) for path in runs.glob("*/plan.json") if not path.parent.name.startswith(".")]
    return _newest_first(directories)


def _newest_first(runs: list[RunDirectory]) -> list[RunDirectory]:
    return sorted(runs, key=lambda run: (run.plan.stat().st_mtime, run.path.name), reverse=True)


def request_stop(run: RunDirectory, pid: int, signal_number: int) -> None:
    """Request a stop; the signal number sets the exit status."""
    if WINDOWS:  # os.kill would terminate the process immediately
        with run.stop_requests.open("ab") as file:
            file.write(f"{signal_number}\n".encode())
    else:
        os.kill(pid, signal_number)


def request_stop_once(run: RunDirectory, pid: int, signal_number: int) -> None:
    """Request a stop, unless one was requested since the run's start."""
    # A second request ends a run immediately: the lock keeps two commands from both sending one, and is freed if its holder is
    # killed. On Windows the request itself is a line of `stop_requests`; elsewhere a line is added after the signal.
    lock = None
    with contextlib.suppress(OSError):  # a full disk: better two requests than none
        lock = take_lock(run.stop_lock, wait_s=1)
    try:
        with contextlib.suppress(OSError):  # no request yet
            if run.stop_requests.stat().st_size > 0:
                return
        request_stop(run, pid, signal_number)
        if not WINDOWS:
            with contextlib.suppress(OSError), run.stop_requests.open("ab") as file:
                file.write(b"signalled\n")
    finally:
        if lock is not None:
            lock.release()


def read_stop_requests(run: RunDirectory) -> list[int]:
    """Return the signal numbers in the run's file."""
    try:
        return [int(line) for line in run.stop_requests.read_bytes().splitlines() if line.isdigit()]
    except OSError:
        return []
