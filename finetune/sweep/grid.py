"""Which values a sweep tries: those of overrides with commas, else learning rates around the planner's advice."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from finetune.errors import CommandError, RecipeError
from finetune.recipe import load_changes
from finetune.settings import Recipe

#: The learning rate's own scale: half a decade between neighbours, a decade to both sides of the advice.
RATE_FACTORS = (0.1, 10**-0.5, 1.0, 10**0.5, 10.0)
#: More arms than this are hardly meant.
MOST_ARMS = 64

Parse = Callable[[list[str]], Recipe]


def split_overrides(overrides: list[str], parse: Parse) -> tuple[list[str], dict[str, list[Any]]]:
    """Overrides of every arm, and the values of each swept setting, in order and without repetitions.

    An override is swept if it has commas and is no value of its setting as it is, but each of its parts is. `parse` makes a
    recipe of overrides. Raises RecipeError for other values, and CommandError for too many.
    """
    fixed, swept = [], {}
    for override in overrides:
        name, _, text = override.partition("=")
        if "," not in text or _is_valid(override, parse):
            fixed.append(override)
            continue
        changes = [load_changes([f"{name}={part.strip()}"]) for part in text.strip().strip("[]").split(",") if part.strip()]
        setting = next(iter(changes[0]))
        values = [getattr(parse([f"{setting}={change[setting]}"]), setting) for change in changes]
        numbers = all(isinstance(value, (int, float)) for value in values)
        swept[setting] = sorted(set(values)) if numbers else [*dict.fromkeys(values)]
    count = math.prod(map(len, swept.values()))
    if count > MOST_ARMS:
        raise CommandError(f"{count:,} combinations are more than {MOST_ARMS}", "Give fewer values.")
    return fixed, swept


def _is_valid(override: str, parse: Parse) -> bool:
    try:
        parse([override])
    except RecipeError:
        return False
    return True


def rates_around(advice: float) -> list[float]:
    """Learning rates around the advice, with two significant digits."""
    return [float(f"{advice * factor:.1e}") for factor in RATE_FACTORS if advice * factor < 1]


def combinations(swept: dict[str, list[Any]]) -> list[dict[str, Any]]:
    """Every combination of values, in the order of the settings."""
    return [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]


def nearest_to_centre(values: list[dict[str, Any]], swept: dict[str, list[Any]], count: int) -> list[dict[str, Any]]:
    """The `count` combinations in the middle of the grid, in the order of `values`."""

    def distance(combination: dict[str, Any]) -> float:
        return sum(abs(swept[name].index(value) - (len(swept[name]) - 1) / 2) for name, value in combination.items())

    nearest = sorted(values, key=distance)[:count]
    return [combination for combination in values if combination in nearest]


def are_neighbours(first: dict[str, Any], second: dict[str, Any], swept: dict[str, list[Any]]) -> bool:
    """Whether two combinations differ by one step of one setting."""
    steps = [abs(swept[name].index(first[name]) - swept[name].index(second[name])) for name in swept]
    return sum(steps) == 1
