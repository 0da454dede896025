"""The settings of torch's allocator for rows of uneven length: those whose replay reserves clearly less than the usual ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from finetune.card.allocator import AllocatorSettings
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.memory.variable_length import Growth

#: Other settings must save more than this share of what the usual ones reserve.
CLEAR_GAIN = 0.02
#: Sizes of the block that is allocated and freed before the first step, as shares of what a step allocates: some of that is in
#: small blocks, which have segments of their own.
_WARM_UPS = (0.8, 0.9, 1.0)


def candidates(step_bytes: int) -> list[AllocatorSettings]:
    """The usual settings without expandable segments, first, and others to try. `step_bytes`: what a step allocates beside what
    is loaded."""
    usual = AllocatorSettings()
    return [
        usual,
        replace(usual, roundup_power2_divisions=8),
        replace(usual, max_split_size_mb=512),
        replace(usual, garbage_collection_threshold=0.8),
        *(replace(usual, warm_up_bytes=round(share * step_bytes)) for share in _WARM_UPS),
    ]


def clearly_less(usual: Growth) -> float:
    """Reserved bytes below which other settings clearly save memory."""
    return (1 - CLEAR_GAIN) * usual.reserved_bytes


def choose(tried: Sequence[AllocatorSettings], growths: Sequence[Growth | None]) -> tuple[int, str]:
    """Index of the settings to run with, and why. The first are the usual ones, chosen unless others clearly save memory.

    Of those that save about as much as the best: fewest retries, then fewest bytes returned to the driver, which takes time.
    No reason where only the usual ones were tried.
    """
    usual = growths[0]
    assert usual is not None  # replayed without an upper bound
    better = {
        index: growth for index, growth in enumerate(growths)
        if growth is not None and growth.reserved_bytes < clearly_less(usual)
    }  # fmt: skip
    if len(tried) == 1:
        return 0, "" if tried[0].expandable_segments else "the allocator's other settings are not tried with this torch"
    if not better:
        return 0, f"no other setting of the allocator that was replayed saves more than {CLEAR_GAIN:.0%} of it"
    least_reserved = min(growth.reserved_bytes for growth in better.values())
    index, chosen = min(
        ((index, growth) for index, growth in better.items() if growth.reserved_bytes <= (1 + CLEAR_GAIN) * least_reserved),
        key=lambda item: (item[1].retries, item[1].returned_bytes, item[1].reserved_bytes),
    )
    return index, (
        f"the run gets {_summary(tried[index])}: torch reserves {format_bytes(chosen.reserved_bytes)} with it and "
        f"{format_bytes(usual.reserved_bytes)} without, by a replay of {len(tried)} settings"
    )


def _summary(settings: AllocatorSettings) -> str:
    if settings.warm_up_bytes:
        return f"one segment for its steps, a block of {format_bytes(settings.warm_up_bytes)} that is freed before the first"
    (setting,) = settings.environment().values()
    return setting
