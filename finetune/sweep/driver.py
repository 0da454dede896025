"""Drives a sweep to its end: `python -m finetune.sweep.driver SWEEP`, in its own session.

It trains one arm after another to the next rung, as runs through the queue. All it knows is in the arms' run directories, so
that it goes on where it was killed.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from finetune.errors import FINISHED, FinetuneError
from finetune.privacy import keep_private
from finetune.run import control
from finetune.run.directory import RunDirectory
from finetune.run.held_out import let_train, pause_step
from finetune.run.state import is_alive, read_state
from finetune.sweep.sweep import ArmFacts, Sweep, can_not_train, label, open_sweep
from finetune.system import ignore_hangup, take_lock
from finetune.units import format_seconds

_POLL_S = 0.2
#: Seconds that a stopped arm gets for its step and its checkpoint.
_STOP_DEADLINE_S = 600.0
Log = Callable[[str], None]


class Stopped(Exception):
    """Somebody has asked the sweep, or its arm, to stop."""


class Driver:
    """Trains the arms of one sweep."""

    def __init__(self, sweep: Sweep, log: Log) -> None:
        self.sweep, self.log, self.signals = sweep, log, list[int]()

    def drive(self) -> None:
        """Train and compare until the sweep is finished. Raises Stopped, and FinetuneError for an arm that can't be started."""
        announced: dict[str, int] = {}
        while True:
            alive, rung, dropped_at = self.sweep.survivors()
            for arm in self.sweep.facts.arms:
                if arm.name in dropped_at and arm.name not in announced:
                    announced[arm.name] = dropped_at[arm.name]
                    let_train(self.sweep.run_of(arm), None)  # for whoever resumes it by hand
                    self.log(f"step {dropped_at[arm.name]:,}: {label(arm.values)} is dropped{self._why(arm)}")
            waiting = [arm for arm in alive if not self.sweep.has_reached(arm, rung)]
            if not waiting:
                return
            self._train(waiting[0], rung)

    def _why(self, arm: ArmFacts) -> str:
        state = read_state(self.sweep.run_of(arm))
        return f": {state.message or state.state}" if can_not_train(state) else ""

    def _train(self, arm: ArmFacts, rung: int) -> None:
        run, last = self.sweep.run_of(arm), self.sweep.facts.rungs[-1]
        began_s = time.monotonic()
        if not is_alive(run):
            target = None if rung == last else rung
            if pause_step(run) != target:
                let_train(run, target)
            is_new = read_state(run).state == "queued"
            self.log(f"{label(arm.values)}: training to step {rung:,} of {last:,}  ({run.path})")
            (control.start if is_new else control.resume)(run)
        self._wait(run)
        state = read_state(run)
        loss = self.sweep.losses_at(arm, rung)
        shown = f"held-out loss {loss.mean:.4f}" if loss else state.message or state.state
        took = format_seconds(time.monotonic() - began_s)
        self.log(f"{label(arm.values)}: {state.state} at step {state.step or 0:,}, {shown} ({took})")
        if not self.sweep.has_reached(arm, rung):
            raise Stopped(f"{run.path} {state.state}: {state.message}")

    def _wait(self, run: RunDirectory) -> None:
        """Wait for the arm's end; on a request to stop, stop it first."""
        while not read_state(run).ended or is_alive(run):
            if self.signals or self.sweep.stop_request.exists():
                control.stop(run)
                control.wait(run, _STOP_DEADLINE_S)
                raise Stopped("stopped")
            time.sleep(_POLL_S)


def main() -> int:
    """Entry point of the process."""
    keep_private()
    ignore_hangup()
    sweep = open_sweep(Path(sys.argv[1]))
    lock = take_lock(sweep.lock, wait_s=1)
    if lock is None:
        return 2

    def log(message: str) -> None:
        sys.stdout.write(message + "\n")
        sys.stdout.flush()

    driver = Driver(sweep, log)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: driver.signals.append(number))
    sweep.stop_request.unlink(missing_ok=True)
    try:
        driver.drive()
    except Stopped as reason:
        log(f"the sweep has stopped ({reason}); to go on: finetune sweep {sweep.path}")
        return 130
    except FinetuneError as error:
        log(" ".join([*error.problems, error.fix]))
        return error.exit_code
    finally:
        lock.release()
    log(sweep.sentence())
    return FINISHED


if __name__ == "__main__":
    sys.exit(main())
