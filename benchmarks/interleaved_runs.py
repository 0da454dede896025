"""Runs that train in turn in one process, a few steps each, so that other programs slow all of them down alike."""

from __future__ import annotations

import math
import queue
import threading
import time
from typing import Any

from transformers import TrainerCallback


class Run(TrainerCallback):
    """A run, in its own thread, that trains only in its turns. `seconds`: of the timed steps."""

    def __init__(self, trainer: Any) -> None:
        self.seconds: list[float] = []
        self._turns: queue.Queue[int] = queue.Queue()
        self._results: queue.Queue[BaseException | None] = queue.Queue()
        self._left = self._number = 0
        self._timed, self._began = False, 0.0
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
        took = time.process_time() - self._began
        self._number, self._left = self._number + 1, self._left - 1
        if self._timed:
            self.seconds.append(took)
        self._timed = self._left > 0
        if not self._left and self._number < state.max_steps:
            self._results.put(None)
            self._left = self._turns.get()
        self._began = time.process_time()


def ratio_text(middle: float, wide: float) -> str:
    """A ratio with its interval, from their logarithms."""
    return f"{math.exp(middle):.3f} (95 % interval {math.exp(middle - wide):.3f} to {math.exp(middle + wide):.3f})"
