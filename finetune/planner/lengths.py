"""max_length: the limits the planner may try, and what each costs in bytes and dropped tokens."""

from __future__ import annotations

from finetune.planner.choices import Choices
from finetune.planner.defaults import LENGTH_STEP
from finetune.planner.plan import DataStatistics, LengthCost
from finetune.planner.speed import Batches

#: The planner never chooses a limit below this.
LEAST_LENGTH = 256


def open_lengths(choices: Choices, data: DataStatistics | None) -> list[int]:
    """The chosen max_length, then shorter ones if the recipe leaves it open and allows losing long rows."""
    first: int = choices.value("max_length")
    keeps_rows = data is not None and bool(data.lengths) and choices.recipe.excess_length == "raise"
    if choices.is_set("max_length") or keeps_rows:
        return [first]
    least = LEAST_LENGTH + (sum(data.picture_tokens) if data else 0)
    return [first, *(length for length in (first // part for part in (2, 4, 8)) if length >= least)]


def with_length(choices: Choices, length: int, data: DataStatistics | None) -> Choices:
    """Resolve max_length to a shorter limit; the reason says what that costs."""
    first = choices.value("max_length")
    if length == first:
        return choices
    rows, tokens = batches_of(choices, data).dropped_above(length)
    lengths_known = data and data.lengths
    cost = f"{rows:,} rows are longer, by {tokens:,} tokens in all" if lengths_known else "longer rows are dropped or truncated"
    return choices.choose("max_length", length, f"rows of {first:,} tokens do not fit on this card; {cost}")


def batches_of(choices: Choices, data: DataStatistics | None) -> Batches:
    """Micro-batches under the chosen max_length."""
    return Batches(choices.value("max_length"), choices.value("packing") is True, data)


def length_costs(batches: Batches) -> tuple[LengthCost, ...]:
    """Other values of max_length: rows and tokens dropped."""
    lengths = batches.data.lengths if batches.data else ()
    if not lengths:
        return ()
    at = [lengths[min(len(lengths) - 1, int(share * len(lengths)))] for share in (0.5, 0.9, 0.99)]
    limits = sorted({-(-length // LENGTH_STEP) * LENGTH_STEP for length in at} | {batches.max_length, 2 * batches.max_length})
    return tuple(LengthCost(limit, *batches.dropped_above(limit)) for limit in limits)
