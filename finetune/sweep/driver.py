"""Drives a sweep to its end: `python -m finetune.sweep.driver SWEEP`, in its own session.

It trains the arms to the next rung as runs through the queue, one at a time on each card. All it knows is in the arms' run
directories, so that it goes on where it was killed.
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
    """Trains the arms of one sweep, one at a time on each card."""

    def __init__(self, sweep: Sweep, log: Log) -> None:
        self.sweep, self.log, self.signals = sweep, log, list[int]()
        #: Arms in training by name: the rung they train to, and when that began.
        self.training: dict[str, tuple[int, float]] = {}

    def drive(self) -> None:
        """Train and compare until the sweep is finished. Raises Stopped, and FinetuneError for an arm that can't be started."""
        announced: set[str] = set()
        try:
            while self._next_comparison(announced):
                self._wait()
        except (Stopped, FinetuneError):
            self._stop()
            raise

    def _next_comparison(self, announced: set[str]) -> bool:
        """Start what may train now; False when the sweep is finished."""
        alive, rung, dropped_at = self.sweep.survivors()
        if any(target != rung for target, _ in self.training.values()):
            return True  # an arm that has its losses still writes its checkpoint
        for arm in self.sweep.facts.arms:
            if arm.name in dropped_at and arm.name not in announced:
                announced.add(arm.name)
                let_train(self.sweep.run_of(arm), None)  # for whoever resumes it by hand
                self.log(f"step {dropped_at[arm.name]:,}: {label(arm.values)} is dropped{self._why(arm)}")
        waiting = [arm for arm in alive if arm.name in self.training or not self.sweep.has_reached(arm, rung)]
        first_of_card: dict[str | None, ArmFacts] = {}
        for arm in sorted(waiting, key=lambda arm: arm.name not in self.training and not is_alive(self.sweep.run_of(arm))):
            first_of_card.setdefault(arm.card, arm)
        for arm in first_of_card.values():
            if arm.name not in self.training:
                self._start(arm, rung)
        return bool(waiting)

    def _why(self, arm: ArmFacts) -> str:
        state = read_state(self.sweep.run_of(arm))
        return f": {state.message or state.state}" if can_not_train(state) else ""

    def _start(self, arm: ArmFacts, rung: int) -> None:
        run, last = self.sweep.run_of(arm), self.sweep.facts.rungs[-1]
        self.training[arm.name] = rung, time.monotonic()
        if is_alive(run):
            return
        target = None if rung == last else rung
        if pause_step(run) != target:
            let_train(run, target)
        is_new = read_state(run).state == "queued"
        card = "" if arm.card is None else f" on card {arm.card}"
        self.log(f"{label(arm.values)}: training to step {rung:,} of {last:,}{card}  ({run.path})")
        (control.start if is_new else control.resume)(run)

    def _wait(self) -> None:
        """Wait until an arm has ended. Raises Stopped on a request, and for an arm that ended before its rung."""
        while True:
            for arm in self.sweep.facts.arms:
                run = self.sweep.run_of(arm)
                if arm.name in self.training and read_state(run).ended and not is_alive(run):
                    self._end(arm)
                    return
            if self.signals or self.sweep.stop_request.exists():
                raise Stopped("stopped")
            time.sleep(_POLL_S)

    def _end(self, arm: ArmFacts) -> None:
        rung, began_s = self.training.pop(arm.name)
        run = self.sweep.run_of(arm)
        state, loss = read_state(run), self.sweep.losses_at(arm, rung)
        shown = f"held-out loss {loss.mean:.4f}" if loss else state.message or state.state
        took = format_seconds(time.monotonic() - began_s)
        self.log(f"{label(arm.values)}: {state.state} at step {state.step or 0:,}, {shown} ({took})")
        if not self.sweep.has_reached(arm, rung):
            raise Stopped(f"{run.path} {state.state}: {state.message}")

    def _stop(self) -> None:
        """Stop the arms in training, each after its step, and wait for them."""
        runs = [self.sweep.run_of(arm) for arm in self.sweep.facts.arms if arm.name in self.training]
        for run in runs:
            control.stop(run)
        for run in runs:
            control.wait(run, _STOP_DEADLINE_S)


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
