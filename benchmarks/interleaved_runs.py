"""Runs that train in turn in one process, a few steps each, so that other programs slow all of them down alike."""

from __future__ import annotations

import math
import queue
import sys
import threading
import time
from typing import Any

from transformers import TrainerCallback

#: Calls are counted in one step of so many, which is not timed; an epoch, whose end makes more calls, has 100.
EVERY = 47


class Run(TrainerCallback):
    """A run, in a thread of its own, that trains only in its turns.

    `seconds`: of the timed steps. `calls`: of each counted step. `first_s`: processor seconds to the end of the first step.
    """

    def __init__(self, trainer: Any) -> None:
        self.seconds: list[float] = []
        self.calls: list[int] = []
        self.first_s = 0.0
        self._turns: queue.Queue[int] = queue.Queue()
        self._results: queue.Queue[BaseException | None] = queue.Queue()
        self._left = self._number = 0
        self._counted, self._timed, self._began = -1, False, 0.0
        self._trainer = trainer
        self._trainer.add_callback(self)
        threading.Thread(target=self._train, daemon=True).start()

    def advance(self, steps: int) -> list[float]:
        """Train so many steps; returns the processor seconds of those timed. Raises what the trainer raises."""
        before = len(self.seconds)
        self._turns.put(steps)
        if error := self._results.get():
            raise error
        return self.seconds[before:]

    def _train(self) -> None:
        try:
            self._left = self._turns.get()
            self._began = time.process_time()
            self._trainer.train()
            self._results.put(None)
        except BaseException as error:  # noqa: BLE001 - raised in advance()
            self._results.put(error)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the step; at a turn's end wait for the next one."""
        sys.setprofile(None)
        took = time.process_time() - self._began
        self._number, self._left = self._number + 1, self._left - 1
        if self._counted >= 0:
            self.calls.append(self._counted)
        elif self._timed:
            self.seconds.append(took)
        if self._number == 1:
            self.first_s = took
        self._timed = self._left > 0
        if not self._left and self._number < state.max_steps:
            self._results.put(None)
            self._left = self._turns.get()
        self._counted = 0 if self._number % EVERY == 0 else -1
        self._began = time.process_time()
        if self._counted == 0:
            sys.setprofile(self._count)

    def _count(self, _frame: Any, event: str, _argument: Any) -> None:
        self._counted += event in ("call", "c_call")


def ratio_text(middle: float, wide: float) -> str:
    """A ratio with its interval, from their logarithms."""
    return f"{math.exp(middle):.3f} (95 % interval {math.exp(middle - wide):.3f} to {math.exp(middle + wide):.3f})"
