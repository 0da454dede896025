"""What a micro-batch holds after collation: its width in the mean, for speed, and at worst, for memory."""

from __future__ import annotations

from dataclasses import dataclass

from finetune.plan.plan import DataStatistics
from finetune.recipe import Recipe


@dataclass(frozen=True)
class Batches:
    """Widths of the rows in a micro-batch, in tokens. `longest` is the widest there is; without data both are max_length."""

    max_length: int
    packed: bool
    data: DataStatistics | None

    @property
    def longest(self) -> int:
        """Width of the worst micro-batch: padded to its longest row, or packed up to max_length."""
        if self.packed or self.data is None or not self.data.longest:
            return self.max_length
        return min(self.data.longest, self.max_length)

    def mean_width(self, rows: int) -> float:
        """Mean padded width of a micro-batch of `rows` rows in random order: the expected longest of so many draws."""
        if self.packed or self.data is None or not self.data.lengths:
            return float(self.max_length)
        lengths, count = self.data.lengths, len(self.data.lengths)
        total, below = 0.0, 0.0
        for place, length in enumerate(lengths, start=1):
            upto = (place / count) ** rows
            total += min(length, self.max_length) * (upto - below)
            below = upto
        return total

    @property
    def tokens_per_row(self) -> float:
        """Mean tokens of a row without padding; of a packed row max_length."""
        return self.mean_width(1)

    @property
    def attended(self) -> float:
        """Mean tokens that a packed row attends over: a row's own, and not the sequence's."""
        if not self.packed or self.data is None or not self.data.lengths:
            return float(self.max_length)
        return sum(length * length for length in self.data.lengths) / max(1, self.data.total_tokens)

    @property
    def trained_share(self) -> float:
        """Share of the tokens that the loss is taken of."""
        return self.data.trained_tokens / self.data.total_tokens if self.data and self.data.total_tokens else 1.0

    def dropped_above(self, limit: int) -> tuple[int, int]:
        """Rows longer than `limit`, and the tokens of them beyond it."""
        over = [length for length in (self.data.lengths if self.data else ()) if length > limit]
        return len(over), sum(over) - limit * len(over)


def batches_of(settings: Recipe, data: DataStatistics | None) -> Batches:
    """What the settings make of the data. `settings` has max_length and packing resolved."""
    return Batches(max_length=settings.max_length, packed=settings.packing is True, data=data)
