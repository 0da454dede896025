"""Plans likely next slider positions in forks between questions; the forecast cache on disk keeps the results."""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from finetune.settings import Recipe, resolved

#: Usual values by setting.
USUAL = {
    "lora_r": (8, 16, 32, 64, 128, 256),
    "max_length": (256, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16384),
    "effective_batch_size": (1, 2, 4, 8, 16, 32, 64, 128),
}
MakePlan = Callable[[Recipe, Callable[[str], None]], Any]


class PlanPrefetcher:
    """Plans recipes that differ in one setting from the last planned one, nearest value first.

    One fork of this process for each setting: it has the libraries and the data already, and no question waits for it. `leave`
    are the file descriptors that the forks close. Without os.fork (Windows) nothing is planned ahead.
    """

    def __init__(self, make_plan: MakePlan, leave: tuple[int, ...] = (), is_planned: Callable[[Recipe], bool] | None = None):
        self._make_plan, self._leave, self._is_planned = make_plan, leave, is_planned or (lambda _recipe: False)
        self._children: list[int] = []

    def start_from(self, recipe: Recipe, settings: Recipe) -> None:
        """Plan the neighbours of this recipe, which was planned with these settings; ends the work on the last one's."""
        self.end()
        for name in USUAL if hasattr(os, "fork") else ():
            parent, child = os.getpid(), os.fork()
            if child == 0:
                self._work(neighbours(recipe, settings, name), parent)
            self._children.append(child)

    def end(self) -> None:
        """End the forks; finished forecasts stay in the cache. No question waits until the kernel has freed their memory."""
        for child in self._children:
            os.kill(child, signal.SIGKILL)
        self._children = [child for child in self._children if os.waitpid(child, os.WNOHANG) == (0, 0)]

    def wait(self) -> None:
        """Wait until all forks have ended."""
        while self._children:
            os.waitpid(self._children.pop(), 0)

    def _work(self, recipes: Iterator[Recipe], parent: int) -> None:
        try:
            os.nice(10)
            for file in self._leave:
                os.close(file)
            for recipe in recipes:
                if os.getppid() != parent:
                    break
                if self._is_planned(recipe):
                    continue
                with contextlib.suppress(Exception):  # the error is shown when that plan is asked for
                    self._make_plan(recipe, lambda _doing: None)
        finally:
            os._exit(0)


def neighbours(recipe: Recipe, settings: Recipe, name: str) -> Iterator[Recipe]:
    """The recipe with one setting at each usual value, those nearest to the plan's first; yields valid recipes only."""
    now = getattr(settings, name)
    for value in sorted((value for value in USUAL[name] if value != now), key=lambda value: abs(math.log(value / now))):
        with contextlib.suppress(ValueError):  # does not go with what the recipe sets
            yield resolved(recipe, **{name: value})
