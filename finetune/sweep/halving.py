"""Which arms of a sweep train on after a rung: successive halving that drops only what is surely behind.

Successive halving: Jamieson and Talwalkar 2016. A loss before the rate has fallen is a biased guess of the one after: an early
comparison prefers rates that are too low (short-horizon bias: Wu et al. 2018). So an arm is dropped only if all are true:
it is in the worse half; its loss is surely higher than the best arm's (95 % interval of a paired bootstrap over the held-out
rows, which all arms share); and it is no neighbour of the best arm in the grid. benchmarks/sweep_halving.py simulates the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from finetune.evaluate.paired import Difference, difference

#: Shares of the steps after which arms are compared.
RUNGS = (0.25, 0.5)
RULE = (
    "of the worse half, arms are dropped whose held-out loss is surely higher than the best arm's (95 % interval of a paired "
    "bootstrap over the same rows) and that are no neighbours of it in the grid; arms that diverge are dropped at once"
)


@dataclass(frozen=True)
class RowLosses:
    """Held-out loss of an arm after `step`: of each row, with its trained tokens. Rows are unknown where only the mean is."""

    step: int
    mean: float
    losses: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()


def rungs_of(total_steps: int) -> list[int]:
    """Steps at which arms are compared, the last step included."""
    return sorted({*(max(1, round(share * total_steps)) for share in RUNGS), total_steps})


def gap(best: RowLosses, other: RowLosses) -> Difference | None:
    """Loss of `other` minus that of `best`, paired by rows; None where the rows are not known, or not the same."""
    if len(best.losses) < 2 or best.tokens != other.tokens:  # noqa: PLR2004 - an interval needs two rows
        return None
    return difference(best.losses, other.losses, best.tokens)


def dropped(results: Sequence[RowLosses | None], are_neighbours: Callable[[int, int], bool]) -> list[int]:
    """Indices of the arms to drop. `results`: None of an arm that diverged or failed. The best arm always stays.

    Where only means are known nothing is sure, and the worse half is dropped but for the best arm's neighbours.
    """
    finite = {index: result for index, result in enumerate(results) if result is not None}
    behind = [index for index in range(len(results)) if index not in finite]
    ordered = sorted(finite, key=lambda index: finite[index].mean)
    for index in ordered[-(-len(ordered) // 2) :]:
        interval = gap(finite[ordered[0]], finite[index])
        if not are_neighbours(ordered[0], index) and (interval is None or interval.low > 0):
            behind.append(index)
    return sorted(behind)
