"""Compares measured memory with the plan's forecast after two steps and at the end, and records it for later plans."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from finetune.card.context import record_measurement
from finetune.events import Event, ForecastCheck, Memory, Start, State, Step
from finetune.planner.history import record_run
from finetune.planner.plan import Plan, Verdict
from finetune.units import format_bytes

#: First steps that allocate more than this share over the forecast are worth a warning.
MARGIN = 0.10
_WARM_UP_STEPS = 2


def compare_with_forecast(plan: Plan, memory: Memory, *, at: str, step: int) -> ForecastCheck:
    """Forecast and measured bytes and segments, and the relative errors; None for what this machine can't measure."""
    forecast, measured = plan.forecast, memory.peak_allocated_bytes
    predicted, reserved = forecast.allocated_bytes if forecast else None, memory.peak_reserved_bytes
    predicted_reserved = forecast.reserved_peaks.get("train") if forecast else None
    return ForecastCheck(
        at=at, step=step, predicted_allocated_bytes=predicted, measured_allocated_bytes=measured,
        allocated_error=_error(measured, predicted), predicted_peak_bytes=forecast.peak_bytes if forecast else None,
        measured_card_bytes=memory.own_card_bytes, measured_reserved_bytes=reserved,
        predicted_reserved_bytes=predicted_reserved, reserved_error=_error(reserved, predicted_reserved),
        predicted_segments=forecast.segments.get("train") if forecast else None, measured_segments=memory.peak_segments,
    )  # fmt: skip


def _error(measured: int | None, predicted: int | None) -> float | None:
    return measured / predicted - 1 if measured and predicted else None


def excess_warning(plan: Plan, check: ForecastCheck) -> str | None:
    """A warning when the run allocated far more than forecast, None when it did not or was started with --force.

    It is never more than the budget, which limits the allocator: that would have been out of memory.
    """
    error = check.allocated_error
    if error is None or error <= MARGIN or plan.verdict == Verdict.NO_FIT:
        return None
    return (
        f"the first steps allocated {format_bytes(check.measured_allocated_bytes)}, but the forecast was "
        f"{format_bytes(check.predicted_allocated_bytes)} ({error:+.0%}); it still fits the budget of "
        f"{format_bytes(plan.usable_bytes)}. This is a bug in the forecast: please report it with plan.json."
    )


def compare_at_end(plan: Plan, steps: list[Step]) -> ForecastCheck | None:
    """The comparison for the peaks of the whole run; None without a step."""
    return compare_with_forecast(plan, highest(steps), at="end", step=steps[-1].step) if steps else None


def highest(memories: Sequence[Memory]) -> Memory:
    """The highest of each peak; the card's without other programs."""
    peaks = {
        name: max((size for memory in memories if (size := getattr(memory, name)) is not None), default=None)
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_segments", "own_card_bytes")
    }
    return Memory(card_used_bytes=peaks.pop("own_card_bytes"), other_processes_bytes=0, **peaks)


def whole_run_s(events: Sequence[Event]) -> tuple[float, float] | None:
    """Seconds of loading, and from then on until now, of a run that trained in one go; None of one that was resumed."""
    starts = [event for event in events if isinstance(event, Start)]
    began = next((event for event in reversed(events) if isinstance(event, State) and event.state == "starting"), None)
    if len(starts) != 1 or starts[0].step or not (began and began.time_s and starts[0].time_s and events[-1].time_s):
        return None
    return starts[0].time_s - began.time_s, events[-1].time_s - starts[0].time_s


def record_measurements(plan: Plan, steps: list[Step], whole_run: tuple[float, float] | None) -> None:
    """Record speed, memory and the CUDA context's size on this card, for later plans; to be called by the training process.

    Raises OSError when the cache can't be written.
    """
    later, peaks = [step.step_s for step in steps[_WARM_UP_STEPS:] if step.step_s], highest(steps)
    load_s, train_s = whole_run or (None, None)
    record_run(
        plan, step_s=statistics.median(later) if later else None, allocated_bytes=peaks.peak_allocated_bytes,
        reserved_bytes=peaks.peak_reserved_bytes, segments=peaks.peak_segments, load_s=load_s, train_s=train_s,
    )  # fmt: skip
    if measured := [size for step in steps if (size := step.context_bytes) and size > 0]:
        record_measurement(plan.card.name, int(statistics.median(measured)))
