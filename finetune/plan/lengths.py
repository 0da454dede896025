"""The limit of length: which limits the planner may try, and what each would cost in bytes and in dropped tokens."""

from __future__ import annotations

from typing import Any

from finetune.plan.choices import Choices
from finetune.plan.plan import DataStatistics
from finetune.plan.search import Anchor, Search
from finetune.plan.speed import Batches

#: No limit below this is planned unasked, and limits are multiples of the step.
LEAST_LENGTH, LENGTH_STEP = 256, 64


class Lengths:
    """max_length as it was first chosen, and the shorter limits the recipe leaves open."""

    def __init__(self, choices: Choices, data: DataStatistics | None) -> None:
        self.choices, self.data = choices, data
        self.first: int = choices.value("max_length")
        self.reason = choices.reasons["max_length"]
        self.packed = choices.value("packing") is True

    def open(self) -> list[int]:
        """The first limit, then shorter ones where nobody asked for it and no row is lost that the recipe wants to keep."""
        keeps_rows = self.data is not None and bool(self.data.lengths) and self.choices.recipe.excess_length == "raise"
        if self.choices.is_set("max_length") or keeps_rows:
            return [self.first]
        shorter = [self.first // part for part in (2, 4, 8)]
        return [self.first, *(length for length in shorter if length >= LEAST_LENGTH)]

    def take(self, length: int) -> Batches:
        """Resolve max_length to `length`, with the reason, and say what micro-batches then hold."""
        reason = self.reason
        if length != self.first:
            rows, tokens = self.batches(self.first).dropped_above(length)
            read = self.data is not None and self.data.lengths
            cost = f"{rows:,} rows are longer, by {tokens:,} tokens" if read else "longer rows are not kept"
            reason = f"{self.first:,} tokens do not fit on this card; {cost}"
        if not self.choices.is_set("max_length"):
            self.choices.choose("max_length", length, reason)
        return self.batches(length)

    def batches(self, length: int) -> Batches:
        """Micro-batches under a limit of `length`."""
        return Batches(length, self.packed, self.data)


def length_costs(search: Search, chosen: Anchor) -> list[dict[str, Any]]:
    """Other limits: bytes they add or save (scaled from the forecast), and the rows and tokens they drop."""
    batches = search.job.batches
    lengths = batches.data.lengths if batches.data else ()
    if not lengths:
        return []
    at = [lengths[min(len(lengths) - 1, int(share * len(lengths)))] for share in (0.5, 0.9, 0.99)]
    limits = sorted({-(-length // LENGTH_STEP) * LENGTH_STEP for length in at} | {batches.max_length, 2 * batches.max_length})
    rows = []
    for limit in limits:
        dropped_rows, dropped_tokens = batches.dropped_above(limit)
        width = limit if limit > batches.max_length or batches.packed else min(limit, batches.longest)
        added = search.high_bytes(chosen.strategy, width) - chosen.forecast.peak_high_bytes
        rows.append({"max_length": limit, "adds_bytes": added, "dropped_rows": dropped_rows, "dropped_tokens": dropped_tokens})
    return rows
