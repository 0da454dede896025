"""Plans for where the sliders may be put next, made beside the questions. The forecasts' cache on disk remembers them."""

from __future__ import annotations

import contextlib
import math
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

    Forks of this process do it, one for each setting, which have the libraries and the data already: no question waits for a
    plan that nobody asked for. `leave` are the file descriptors that they must not hold. Where there is no fork (Windows),
    nothing is done ahead.
    """

    def __init__(self, make_plan: MakePlan, leave: tuple[int, ...] = ()) -> None:
        self._make_plan, self._leave = make_plan, leave
        self._children: list[int] = []

    def start_from(self, recipe: Recipe, settings: Recipe) -> None:
        """Work around this recipe, which was planned with these settings, instead of what was worked at."""
        self.end()
        for name in USUAL if hasattr(os, "fork") else ():
            parent, child = os.getpid(), os.fork()
            if child == 0:
                self._work(neighbours(recipe, settings, name), parent)
            self._children.append(child)

    def end(self) -> None:
        """Drop what is being planned; what has been forecast so far is kept."""
        for child in self._children:
            os.kill(child, signal.SIGKILL)
        self.wait()

    def wait(self) -> None:
        """Until all is planned."""
        while self._children:
            os.waitpid(self._children.pop(), 0)

    def _work(self, recipes: Iterator[Recipe], parent: int) -> None:
        """In a fork. Does not return."""
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


def neighbours(recipe: Recipe, settings: Recipe, name: str) -> Iterator[Recipe]:
    """The recipe with one setting put to each usual value that it allows, the values nearest to the plan's first."""
    now = getattr(settings, name)
    for value in sorted((value for value in USUAL[name] if value != now), key=lambda value: abs(math.log(value / now))):
        with contextlib.suppress(ValueError):  # does not go with what the recipe sets
            yield resolved(recipe, **{name: value})
