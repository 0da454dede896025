"""Plans for where the sliders may be put next, made beside the questions. The forecasts' cache on disk remembers them."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from finetune.recipe import Recipe, resolved

#: What people choose, by setting.
USUAL = {
    "lora_r": (8, 16, 32, 64, 128, 256),
    "max_length": (256, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16384),
    "effective_batch_size": (1, 2, 4, 8, 16, 32, 64, 128),
}
MakePlan = Callable[[Recipe, Callable[[str], None]], Any]


class Ahead:
    """Plans recipes that differ in one setting from the one planned last, nearest first.

    A fork of this process does it, which has the libraries and the data already: no question waits for a plan that nobody asked
    for. `leave` are the file descriptors that the fork must not hold. Where there is no fork (Windows), nothing is done ahead.
    """

    def __init__(self, make_plan: MakePlan, leave: tuple[int, ...] = ()) -> None:
        self._make_plan, self._leave = make_plan, leave
        self._child = 0

    def start_from(self, recipe: Recipe, settings: Recipe) -> None:
        """Work around this recipe, which was planned with these settings, instead of what was worked at."""
        self.end()
        if hasattr(os, "fork"):
            parent = os.getpid()
            self._child = os.fork()
            if self._child == 0:
                self._work(neighbours(recipe, settings), parent)

    def end(self) -> None:
        """Drop what is being planned; what it has forecast so far is kept."""
        if self._child:
            os.kill(self._child, signal.SIGKILL)
            os.waitpid(self._child, 0)
            self._child = 0

    def wait(self) -> None:
        """Until all is planned."""
        if self._child:
            os.waitpid(self._child, 0)
            self._child = 0

    def _work(self, recipes: Iterator[Recipe], parent: int) -> None:
        """In the fork. Does not return."""
        try:
            os.nice(10)
            for file in self._leave:
                os.close(file)
            for recipe in recipes:
                if os.getppid() != parent:
                    break
                with contextlib.suppress(Exception):  # whoever asks for that plan is told
                    self._make_plan(recipe, lambda _doing: None)
        finally:
            os._exit(0)


def neighbours(recipe: Recipe, settings: Recipe) -> Iterator[Recipe]:
    """The recipe with one setting put to each usual value that it allows, the values nearest to the plan's first."""
    steps = []
    for name, values in USUAL.items():
        now = getattr(settings, name)
        others = sorted((value for value in values if value != now), key=lambda value: abs(value - now))
        steps += [(distance, name, value) for distance, value in enumerate(others)]
    for _, name, value in sorted(steps):
        with contextlib.suppress(ValueError):  # does not go with what the recipe sets
            yield resolved(recipe, **{name: value})
