"""Whether compiled layers would pay: the seconds that compiling takes against those that it saves.

Nothing here was measured on a card, so the planner reports it and leaves the choice to the recipe.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from finetune.planner.choices import AS_SET
from finetune.planner.speed import time_step

if TYPE_CHECKING:
    from finetune.planner.choices import Choices
    from finetune.planner.search import Search
    from finetune.planner.strategy import Strategy

#: Seconds to compile one layer's forward and backward, and graphs of a run: first and other layers, training and evaluation.
#: An estimate.
GRAPH_S, GRAPHS = 30.0, 4


def explain_compiling(choices: Choices, search: Search, strategy: Strategy, steps: int | None) -> Choices:
    """Give the reason of `torch_compile`: on, or off where it might pay in a run of so many steps; else nothing is said."""
    recipe = choices.recipe
    plain, compiled = (time_step(dataclasses.replace(search.job, compiled=on), strategy).step_s for on in (False, True))
    gain, needed = 1 - compiled / plain, math.ceil(GRAPHS * GRAPH_S / (plain - compiled)) if plain > compiled else None
    pays = f"pays off after about {needed:,} steps" if needed else "does not pay off"
    if needed and steps:
        pays += f" of {steps:,}"
    model = f"by the model of a step, not measured on a card: saves at most {gain:.0%} of time, {pays}"
    if recipe.torch_compile:
        return choices.with_reason("torch_compile", f"{AS_SET}; {model}")
    excluded = search.job.card.is_cpu or recipe.int8_activations or strategy.offloaded
    if excluded or not needed or not steps or needed > steps / 2:
        return choices
    return choices.with_reason("torch_compile", f"{model}; torch_compile=true tries it, where Triton and a C compiler work")
