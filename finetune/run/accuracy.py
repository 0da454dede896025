"""What a run measured, held against what its plan forecast: after the first step, and at the end for the plans to come."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING

from finetune.card.context import record_measurement
from finetune.errors import DoesNotFit
from finetune.events import ForecastCheck, Memory
from finetune.plan.history import record_run
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.events import Step
    from finetune.plan.plan import Plan

#: A first step that allocates more than this share over the forecast means that something else runs than was planned.
MARGIN = 0.10
_WARM_UP_STEPS = 2


def against_forecast(plan: Plan, memory: Memory, *, at: str, step: int) -> ForecastCheck:
    """Predicted and measured bytes, and the error; what this machine can't measure is None."""
    predicted, measured = plan.forecast.allocated_bytes if plan.forecast else None, memory.peak_allocated_bytes
    return ForecastCheck(
        at=at, step=step, predicted_allocated_bytes=predicted, measured_allocated_bytes=measured,
        allocated_error=measured / predicted - 1 if measured and predicted else None,
        predicted_peak_bytes=plan.forecast.peak_bytes if plan.forecast else None,
        measured_card_bytes=_own_card_bytes(memory), measured_reserved_bytes=memory.peak_reserved_bytes,
    )  # fmt: skip


def refuse_surprise(plan: Plan, check: ForecastCheck) -> None:
    """Raise DoesNotFit when the first step took far more than forecast, unless the plan was started by force."""
    error = check.allocated_error
    if error is None or error <= MARGIN or plan.verdict == "does not fit":
        return
    raise DoesNotFit(
        f"the first step allocated {format_bytes(check.measured_allocated_bytes)}, forecast were "
        f"{format_bytes(check.predicted_allocated_bytes)} ({error:+.0%})",
        "This is a fault of the forecast: please report it with plan.json. --force starts the run all the same.",
    )


def at_end(plan: Plan, steps: list[Step]) -> ForecastCheck | None:
    """The same for the highest of all steps; None without one."""
    if not steps:
        return None
    highest = Memory(
        peak_allocated_bytes=_highest(step.peak_allocated_bytes for step in steps),
        peak_reserved_bytes=_highest(step.peak_reserved_bytes for step in steps),
        card_used_bytes=_highest(_own_card_bytes(step) for step in steps),
    )
    return against_forecast(plan, highest, at="end", step=steps[-1].step)


def remember(plan: Plan, steps: list[Step]) -> None:
    """Keep speed, memory error and the context's size: the next forecast on this card can say how good the last were.

    Raises OSError when the cache can't be written.
    """
    later = [step.step_s for step in steps[_WARM_UP_STEPS:] if step.step_s]
    record_run(
        plan, step_s=statistics.median(later) if later else None,
        allocated_bytes=_highest(step.peak_allocated_bytes for step in steps),
        reserved_bytes=_highest(step.peak_reserved_bytes for step in steps),
    )  # fmt: skip
    contexts = [_context_bytes(step) for step in steps]
    known = [size for size in contexts if size is not None and size > 0]
    if known:
        record_measurement(plan.card.name, int(statistics.median(known)))


def _highest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _own_card_bytes(memory: Memory) -> int | None:
    """In use on the card without other programs, or with them where the driver doesn't tell their share."""
    used = memory.card_used_bytes
    return None if used is None else used - (memory.other_processes_bytes or 0)


def _context_bytes(memory: Memory) -> int | None:
    """Memory of this process on the card outside torch's allocator; None when the driver doesn't tell the others' share."""
    used, others, reserved = memory.card_used_bytes, memory.other_processes_bytes, memory.reserved_bytes
    return None if used is None or others is None or reserved is None else used - others - reserved
