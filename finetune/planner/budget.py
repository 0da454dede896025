"""The memory budget: bytes of the card that the run may take."""

from __future__ import annotations

import math

from finetune.card.card import Card
from finetune.errors import RecipeError
from finetune.planner.choices import Choices
from finetune.units import GIB, format_bytes, parse_bytes


def choose_budget(choices: Choices, card: Card) -> tuple[Choices, int]:
    """The choices with memory_budget resolved, and the budget in bytes.

    Raises RecipeError when the budget does not exceed the CUDA context.
    """
    free = math.floor(card.free_bytes / GIB * 100)
    text = f"{free / 100:.2f}GiB"
    budget, named = parse_bytes(text), f"{format_bytes(card.free_bytes)} free"
    choices = choices.choose("memory_budget", text, f"free of the {format_bytes(card.total_bytes)} on {card.name}")
    if choices.is_set("memory_budget"):
        wanted = parse_bytes(choices.recipe.memory_budget)
        if wanted > card.free_bytes:
            only = f", but only {format_bytes(card.free_bytes)} are free"
            choices = choices.with_reason("memory_budget", choices.reasons["memory_budget"] + only)
        budget, named = min(wanted, card.free_bytes), f"memory_budget {choices.recipe.memory_budget}"
    context = (card.context_bytes or 0) + card.context_uncertainty_bytes
    if budget <= context:
        raise RecipeError(
            f"{named} on {card.name}, but the CUDA context alone may take {format_bytes(context)}",
            "Raise memory_budget, or free memory on the card.",
        )
    return choices, budget
