"""State of a run, derived from events, lock and processes and stored nowhere; remaining time; runs compared."""

from __future__ import annotations

import contextlib
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from finetune.events import ENDED_STATES, Evaluation, Event, EventReader, Start, State, Step, newest, read_events
from finetune.files import read_object
from finetune.system import is_locked

if TYPE_CHECKING:
    from finetune.run.directory import RunDirectory


ENDED = (*ENDED_STATES, "lost")  # `lost` is derived here; other runs are queued, starting, running or pausing
_TAIL_BYTES = 256 * 1024
COMPARED = "Held-out loss at step {step}, the last step that all runs evaluated, lowest first: {losses}."
NOT_COMPARED = "The losses are not compared: no step was evaluated on the same held-out examples by all runs."


@dataclass(frozen=True)
class RunState:
    """State and progress of a run."""

    state: str
    message: str = ""  # the reason and the next command
    exit_code: int | None = None  # None while the run is alive
    step: int | None = None
    total_steps: int | None = None
    loss: float | None = None

    @property
    def ended(self) -> bool:
        return self.state in ENDED


def read_state(run: RunDirectory, events: Sequence[Event] | None = None) -> RunState:
    """Derive a run's state from its newest events and its processes."""
    # a caller that follows the events gives the newest event of each kind
    if events is None:
        events = []
        with contextlib.suppress(FileNotFoundError):  # read only the tail: as fast for long runs
            events = EventReader(run.events, max(0, run.events.stat().st_size - _TAIL_BYTES)).new()
    last, step, start = newest(State, events), newest(Step, events), newest(Start, events)
    state, message = (last.state, last.message) if last else ("starting", "")
    progress: dict[str, Any] = {
        "step": step.step if step else None,
        "total_steps": (step and step.total_steps) or (start and start.total_steps) or None,
        "loss": step.loss if step and math.isfinite(step.loss or 0.0) else None,
    }  # fmt: skip
    alive = is_alive(run)
    if last and state in ENDED:
        living = living_processes(run).values() if alive else ()
        if not any(record["started_s"] > (last.time_s or 0.0) for record in living):  # else a resumed run without events yet
            return RunState(state, message, last.exit_code, **progress)
    if alive:
        return RunState("starting" if state in ENDED else state, message, None, **progress)
    if last is None and not run.process.exists():
        if not run.path.is_dir():
            return RunState("lost", f"{run.path} was deleted", 1, **progress)
        return RunState("queued", "not started yet", None, **progress)
    return RunState("lost", f"its process is gone; resume with: finetune resume {run.path}", 1, **progress)


def is_alive(run: RunDirectory) -> bool:
    """Return whether a recorded process lives or a process holds a lock of the run."""
    return bool(living_processes(run)) or is_locked(run.lock) or is_locked(run.worker_lock)


def living_processes(run: RunDirectory) -> dict[str, dict[str, float]]:
    """Return the recorded processes that live, by role: `{"supervisor": {"pid": 1, "started_s": 1.0}}`."""
    return {role: record for role, record in (read_object(run.process) or {}).items() if is_recorded_process(record)}


def process_record(pid: int) -> dict[str, float | None]:
    """Return id and start of a process: wall clock, and clock ticks since boot on Linux."""
    # the system reuses ids
    return {"pid": pid, "started_s": psutil.Process(pid).create_time(), "started_ticks": _ticks(pid)}


def is_recorded_process(record: Any) -> bool:
    """Return whether the process of a record, which may be damaged, is alive and no zombie."""
    if not isinstance(record, dict) or type(record.get("pid")) is not int or type(record.get("started_s")) not in (int, float):
        return False
    try:
        pid, ticks = record["pid"], record.get("started_ticks")
        process = psutil.Process(pid)
        is_same_process = abs(process.create_time() - record["started_s"]) < 0.05 if ticks is None else _ticks(pid) == ticks
        return is_same_process and process.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, psutil.AccessDenied, ValueError, OverflowError):  # reused by another user; no process id
        return False


def _ticks(pid: int) -> int | None:
    try:
        fields_after_name = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return int(fields_after_name[19])  # field 22, starttime
    except (OSError, ValueError, IndexError):
        return None


@dataclass
class Pace:
    """Seconds of the newest steps and evaluations of a run."""

    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    evaluations_s: deque[float] = field(default_factory=lambda: deque(maxlen=5))
    eval_steps: int | None = None
    newest: Step | None = None  # of this attempt

    def add(self, event: Event) -> None:
        match event:
            case Start():
                self.newest, self.eval_steps = None, event.eval_steps
            case Evaluation() if event.eval_s is not None:
                self.evaluations_s.append(event.eval_s)
            case Step():
                self.newest = event
                if event.step_s is not None:
                    self.steps_s.append(event.step_s)

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step, without checkpoints and sample answers; None before the first step."""
        if self.newest is None or self.newest.total_steps is None or not self.steps_s:
            return None
        total, step = self.newest.total_steps, self.newest.step
        left_s = max(0, total - step) * statistics.median(self.steps_s)
        if self.eval_steps and self.evaluations_s:
            evaluations_left = (total - 1) // self.eval_steps - (step - 1) // self.eval_steps  # the newest step's included
            left_s += max(0, evaluations_left) * statistics.fmean(self.evaluations_s)
        return left_s


def compare_held_out(runs: Sequence[RunDirectory]) -> tuple[str, dict[str, str]]:
    """Return a sentence's template and values: the losses at the last step that all runs have evaluated."""
    losses = dict[str, dict[int, float]]()
    for run in runs:
        evaluated = [event for event in read_events(run.events) if isinstance(event, Evaluation)]
        losses[str(run.path)] = {event.step: event.eval_loss for event in evaluated if event.eval_loss is not None}
    held_out_reports = [(read_object(run.data / "report.json") or {}).get("eval_report") for run in runs]
    step = max(set.intersection(*map(set, losses.values())), default=None)
    if step is None or any(report != held_out_reports[0] for report in held_out_reports):
        return NOT_COMPARED, {}
    ranked = sorted((by_step[step], name) for name, by_step in losses.items())
    return COMPARED, {"step": f"{step:,}", "losses": ", ".join(f"{name} {loss:.4f}" for loss, name in ranked)}
