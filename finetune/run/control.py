"""Start, stop, resume, rename and delete runs. A run outlives the process that started it."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from finetune.card.visible import environment_with_gpus
from finetune.errors import CommandError, DiskFull, RecipeError
from finetune.files import write_json
from finetune.memory.cache import LIBRARIES
from finetune.planner.plan import read_plan
from finetune.recipe import load_changes, recipe_from
from finetune.requirements import refuse_other_versions
from finetune.run.directory import RunDirectory, register, request_stop, request_stop_once, require_data
from finetune.run.retry import adjust, adjusted_plan
from finetune.run.seal import require_base
from finetune.run.state import is_alive, living_processes, process_record, read_state
from finetune.settings.schema import AUTO, Decides, decided_by
from finetune.system import rename, send_line, start_detached

#: Settings without an effect on the result, fixed once a run exists.
_FIXED = {"output_dir", "memory_budget", "host_memory", "launch", "gpu"}
_CHOOSE_RESULT = {"eval_steps", "early_stopping_patience"}  # settings that choose among the steps without changing them
_WHY_FIXED = dict.fromkeys(
    ("max_steps", "num_train_epochs"), "earlier steps had the learning rates of a schedule with the old end"
)
_NAME = re.compile(r"[^\W_]([\w .+-]{0,98}[\w+-])?")  # Windows folders can't end in a dot
_TRASH = ".trash"  # folder of deleted runs, whose names get the time and a number


@contextlib.contextmanager
def early_supervisor() -> Iterator[subprocess.Popen[bytes] | None]:
    """Start a supervisor whose worker imports the libraries before the run exists. Without a run it ends with the block."""
    try:
        process = _start_supervisor(subprocess.DEVNULL, stdin=subprocess.PIPE, bufsize=0)
    except OSError:  # such as too many processes
        yield None
        return
    assert process.stdin is not None
    with process.stdin:
        yield process


def _start_supervisor(log: IO[bytes] | int, *run: Path, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", "-m", "finetune.run.supervise", *map(str, run)]
    return start_detached(command, log, env=environment_with_gpus(), **options)


def start(run: RunDirectory, early: subprocess.Popen[bytes] | None = None) -> int:
    """Start a run's supervisor in a new session, or use `early`; return its process id. Raises CommandError or DiskFull."""
    for path in (run.lock, run.worker_lock, run.log, run.process, run.events):
        if path.exists() and not path.is_file():
            kind = "a folder" if path.is_dir() else "not a regular file"
            problem = f"{path} is {kind}; the run needs a regular file there"
            raise CommandError(problem, f"Delete it, then: finetune resume {run.path}")
    if is_alive(run):
        raise CommandError(f"{run.path} is already running", f"Watch it: finetune watch {run.path}")
    process = None
    try:
        for request in (run.stop_requests, run.finish_request):
            request.unlink(missing_ok=True)  # of an earlier start
        with run.log.open("ab") as log:
            if early and early.stdin and early.poll() is None:
                write_json(run.process, {"supervisor": process_record(early.pid)})  # other commands see the run as alive
                with contextlib.suppress(BrokenPipeError):  # it has ended: a new supervisor is started below
                    send_line(early.stdin, str(run.path))
                    process = early
            if process is None:
                process = _start_supervisor(log, run.path)
                write_json(run.process, {"supervisor": process_record(process.pid)})
    except OSError as error:
        if process is not None:
            process.kill()
        raise DiskFull(f"{run.path} can't be written: {error.strerror or error}", f"Then: finetune resume {run.path}") from None
    return process.pid


def resume(run: RunDirectory) -> int:
    """Resume a run from its newest intact checkpoint. Raises CommandError or PackagesError."""
    refuse_other_versions(LIBRARIES)
    state = read_state(run)
    if state.state == "finished":
        raise CommandError(f"{run.path} has finished; there is nothing to resume", f"Chat with it: finetune chat {run.path}")
    adjusted_plan(run)  # raises for damaged adjustments
    require_base(run)
    require_data(run)
    return start(run)


def update_settings(run: RunDirectory, overrides: list[str]) -> dict[str, Any]:
    """Save and return `key=value` changes for the next attempts. Raises RecipeError."""
    adjusted_plan(run)  # raises for damaged adjustments
    changes = load_changes(overrides)
    fix = f"Start a new run: finetune run {run.recipe} {' '.join(overrides)}"
    problems = []
    for name, value in changes.items():
        if name in _FIXED:
            problems.append(f"{name} can't change once a run exists")
        elif name not in _CHOOSE_RESULT and decided_by(name) & ~(Decides.BYTES | Decides.SPEED):
            reason = _WHY_FIXED.get(name, "earlier steps used another value")
            problems.append(f"{name} would change the training steps: {reason}")
        elif value == AUTO:
            problems.append(f"{name}=auto: the run is already planned; give a value")
    if problems:
        raise RecipeError(problems, fix)
    settings = read_plan(run.plan).settings
    recipe = recipe_from({**settings.model_dump(exclude_unset=True, mode="json"), **changes})
    validated = {name: recipe.model_dump(mode="json")[name] for name in changes}
    adjust(run, validated)
    return validated


def stop(run: RunDirectory, signal_number: int = signal.SIGTERM, *, now: bool = False) -> bool:
    """Stop a run after its step, with a checkpoint. Returns False if the run was not running.

    `now`: repeat an earlier request, which ends the run immediately.
    """
    processes = living_processes(run)
    for role in ("supervisor", "worker"):  # the worker takes requests when its supervisor is gone
        if role in processes:
            # a worker treats a second request as the first: it does not end immediately
            request = request_stop if now or role == "worker" else request_stop_once
            request(run, int(processes[role]["pid"]), signal_number)
            return True
    return False


def finish(run: RunDirectory) -> bool:
    """End a run after its step, with its best step as the result; return False if it wasn't running. Raises DiskFull."""
    if not is_alive(run):
        return False
    try:
        run.finish_request.touch()
    except OSError as error:
        problem = f"{run.path} can't be written: {error.strerror or error}"
        raise DiskFull(problem, f"Or pause it: finetune pause {run.path}") from None
    return True


def wait(run: RunDirectory, deadline_s: float) -> bool:
    """Wait until no process of the run is alive; return False after the deadline."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if not is_alive(run):
            return True
        time.sleep(0.05)
    return False


def rename_run(run: RunDirectory, name: str) -> RunDirectory:
    """Rename a run in its folder. Raises CommandError."""
    name = name.strip()
    if not _NAME.fullmatch(name):
        fix = "Begin with a letter or digit; also allowed: . _ + - and spaces."
        raise CommandError(f"{name[:100]!r} is not a valid run name", fix)
    target = run.path.with_name(name)
    if target.exists():
        raise CommandError(f"{name!r} exists already", "Choose another name.")
    _refuse_alive(run)
    renamed = RunDirectory(rename(run.path, target))
    register(renamed)
    return renamed


def delete_run(run: RunDirectory) -> Path:
    """Move a run to .trash; return its new path. Raises CommandError."""
    _refuse_alive(run)
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{time.time_ns() % 10**6:06d}"
    target = run.path.parent / _TRASH / f"{run.path.name}-{stamp}"
    target.parent.mkdir(exist_ok=True, mode=0o700)
    return rename(run.path, target)


def _refuse_alive(run: RunDirectory) -> None:
    if is_alive(run):
        raise CommandError(f"{run.path.name} is running", f"Pause it first: finetune pause {run.path}")
