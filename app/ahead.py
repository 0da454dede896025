"""Plans for where the sliders may be put next, made while nobody asks. Only the forecasts' cache remembers them."""

from __future__ import annotations

import contextlib
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


class Asked(Exception):
    """Somebody asks: the plan that is being made is dropped, what it has forecast so far is kept."""


class Ahead:
    """Recipes that differ in one setting from the one planned last, nearest first."""

    def __init__(self, make_plan: MakePlan, is_asked: Callable[[], bool]) -> None:
        self._make_plan, self._is_asked = make_plan, is_asked
        self._waiting: Iterator[Recipe] = iter(())

    def start_from(self, recipe: Recipe, settings: Recipe) -> None:
        """Work around this recipe, which was planned with these settings."""
        self._waiting = neighbours(recipe, settings)

    def work(self) -> None:
        """Plan until somebody asks or nothing is left."""
        while not self._is_asked():
            recipe = next(self._waiting, None)
            if recipe is None:
                return
            try:
                self._make_plan(recipe, self._unless_asked)
            except Asked:
                return
            except Exception:  # noqa: BLE001, S112 - whoever asks for that plan is told
                continue

    def _unless_asked(self, _doing: str) -> None:
        if self._is_asked():
            raise Asked


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
