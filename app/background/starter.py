"""Starter of queued runs: `python -m app.background.starter RUNS [ENTRY]`"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from pathlib import Path

from finetune.card.visible import hide_gpus
from finetune.errors import FinetuneError
from finetune.gc_settings import raise_gc_thresholds
from finetune.privacy import keep_private
from finetune.recipe import load_recipe
from finetune.run import control
from finetune.run.directory import RunDirectory
from finetune.run.state import is_alive
from finetune.settings import AUTO
from finetune.system import take_lock

from ..worker import command, environment
from ..workspace import Workspace
from .queue import Entry, Queue

_POLL_S = 0.3


def main() -> int:
    """Start runs until the queue is empty."""
    keep_private()
    raise_gc_thresholds()
    workspace = Workspace(Path.cwd(), Path(sys.argv[1]))
    # the child process, which prepares one entry
    if len(sys.argv) > 2:
        hide_gpus()
        return start(workspace, Entry(Path(sys.argv[2])))
    queue = Queue(workspace)
    lock = take_lock(queue.folder / ".lock", wait_s=1)  # a process that tests the lock holds it for a moment
    if lock is None:
        return 0
    with lock:
        while waiting := queue.waiting():
            _start_next(workspace, waiting[0])
    return 0


def _start_next(workspace: Workspace, entry: Entry) -> None:
    busy = next((run.path.name for run in workspace.list_runs() if is_alive(run)), None)
    if busy:
        status = entry.status()
        message = f"starts when {busy} has ended"
        if status["message"] != message and entry.path.exists():
            entry.set_status("waiting", message, **_options_of(status))
        time.sleep(_POLL_S)
        return
    entry.set_status("preparing", "loading libraries", **_options_of(entry.status()))
    with entry.log.open("ab") as log:
        code = subprocess.run(
            command(".background.starter", str(workspace.runs), str(entry.path)),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            env=environment(), check=False,
        ).returncode  # fmt: skip
    if entry.status()["state"] == "preparing":  # the child died before it could write an error
        entry.set_status("failed", f"the preparation ended with status {code}", problems=[_last_line(entry.log)], fix="")


def start(workspace: Workspace, entry: Entry) -> int:
    """Prepare and start one entry."""
    status = entry.status()
    try:
        if status.get("resume"):
            run = workspace.run(status["resume"]) or RunDirectory(workspace.runs / status["resume"])
            control.resume(run)
        else:
            run = _prepare(workspace, entry, bool(status.get("force")))
            control.start(run)
    except FinetuneError as error:
        # the page shows the error from the status
        entry.set_status("failed", error.title, problems=error.problems, fix=error.fix)
        return error.exit_code
    _wait_until_alive(run)
    entry.set_status("started", "", run=run.path.name)
    return 0


def _prepare(workspace: Workspace, entry: Entry, force: bool) -> RunDirectory:
    from finetune.run.prepare import create_run, prepare

    recipe = load_recipe(entry.recipe)
    options = _options_of(entry.status())
    prepared = prepare(recipe, force=force, progress=lambda text: entry.set_status("preparing", text, **options))
    if recipe.output_dir == AUTO:  # the plan chooses the name, the app the folder
        name = Path(str(prepared.plan.settings.output_dir)).name
        settings = prepared.plan.settings.model_copy(update={"output_dir": str(workspace.runs / name)})
        prepared = dataclasses.replace(prepared, plan=dataclasses.replace(prepared.plan, settings=settings))
    entry.set_status("preparing", "writing the run directory", **options)
    return create_run(prepared)


def _wait_until_alive(run: RunDirectory) -> None:
    # until the supervisor holds the run's lock: the next entry must see a living run
    for _ in range(100):
        if is_alive(run):
            return
        time.sleep(0.1)


def _options_of(status: dict[str, object]) -> dict[str, object]:
    return {name: status.get(name) for name in ("resume", "force", "asked_s")}


def _last_line(path: Path) -> str:
    lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1][:500] if lines else "no output"


if __name__ == "__main__":
    sys.exit(main())
