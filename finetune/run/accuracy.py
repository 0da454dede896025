"""What a run measured, held against what its plan forecast: after the first step, and at the end for the plans to come."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from finetune.card.context import record_measurement
from finetune.errors import DoesNotFit
from finetune.events import read_events
from finetune.plan.history import record_run
from finetune.units import format_bytes

if TYPE_CHECKING:
    from finetune.plan.plan import Plan
    from finetune.run.directory import RunDirectory

#: A first step that allocates more than this share over the forecast means that something else runs than was planned.
MARGIN = 0.10
_WARM_UP_STEPS = 2


def against_forecast(plan: Plan, memory: dict[str, int | None]) -> dict[str, Any]:
    """Predicted and measured bytes after the first step, and the error; what this machine can't measure is None."""
    predicted, measured = plan.forecast.allocated_bytes if plan.forecast else None, memory["peak_allocated_bytes"]
    used, others = memory["card_used_bytes"], memory["other_processes_bytes"]
    return {
        "predicted_allocated_bytes": predicted,
        "measured_allocated_bytes": measured,
        "allocated_error": measured / predicted - 1 if measured and predicted else None,
        "predicted_peak_bytes": plan.forecast.peak_bytes if plan.forecast else None,
        "measured_card_bytes": used - (others or 0) if used is not None else None,
        "measured_reserved_bytes": memory["peak_reserved_bytes"],
    }


def refuse_surprise(plan: Plan, comparison: dict[str, Any]) -> None:
    """Raise DoesNotFit when the first step took far more than forecast, unless the plan was started by force."""
    error = comparison["allocated_error"]
    if error is None or error <= MARGIN or plan.verdict == "does not fit":
        return
    raise DoesNotFit(
        f"the first step allocated {format_bytes(comparison['measured_allocated_bytes'])}, forecast were "
        f"{format_bytes(comparison['predicted_allocated_bytes'])} ({error:+.0%})",
        "This is a fault of the forecast: please report it with plan.json. --force starts the run all the same.",
    )


def remember(plan: Plan, run: RunDirectory) -> None:
    """Keep speed, memory error and the context's size: the next forecast on this card can say how good the last were."""
    steps = [event for event in read_events(run.events) if event["kind"] == "step"]
    later = [event["step_s"] for event in steps[_WARM_UP_STEPS:] if event.get("step_s")]
    record_run(
        plan, step_s=statistics.median(later) if later else None, allocated_bytes=_highest(steps, "peak_allocated_bytes"),
        reserved_bytes=_highest(steps, "peak_reserved_bytes"),
    )  # fmt: skip
    contexts = [_context_bytes(event) for event in steps]
    known = [size for size in contexts if size is not None and size > 0]
    if known:
        record_measurement(plan.card.name, int(statistics.median(known)))


def _highest(steps: list[dict[str, Any]], name: str) -> int | None:
    return max((event[name] for event in steps if event.get(name) is not None), default=None)


def _context_bytes(event: dict[str, Any]) -> int | None:
    """Memory of this process on the card outside torch's allocator; None when the driver doesn't tell the others' share."""
    used, others, reserved = event.get("card_used_bytes"), event.get("other_processes_bytes"), event.get("reserved_bytes")
    return None if used is None or others is None or reserved is None else used - others - reserved
