"""The event of an out-of-memory error, and its explanation: the error's message beside the plan's expectation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from finetune.events import Memory, OutOfMemory
from finetune.memory.forecast import PhaseForecast
from finetune.units import format_bytes

if TYPE_CHECKING:  # the chain of imports stays short
    from finetune.planner.plan import Plan

_MESSAGE_CHARACTERS = 800  # torch lists every process on the GPU


def out_of_memory_event(error: BaseException, phase: str, plan: Plan, memory: Memory) -> OutOfMemory:
    """Return the event of an error. `memory`: measured after the error."""
    forecast = plan.forecast.of_phase(phase) if plan.forecast else PhaseForecast()
    message = str(error).split("\n")[0] or f"{type(error).__name__}."  # a MemoryError has no text
    return OutOfMemory(
        phase=phase, message=message[:_MESSAGE_CHARACTERS],
        micro_batch=plan.settings.per_device_train_batch_size, max_length=plan.settings.max_length,
        forecast_allocated_bytes=forecast.allocated_bytes, forecast_reserved_bytes=forecast.reserved_bytes, **vars(memory),
    )  # fmt: skip


def explanation(event: OutOfMemory) -> str:
    """Return the error's message, then forecast and measured memory of the phase."""
    if event.forecast_allocated_bytes is None:
        return event.message
    expected = _sizes(event.forecast_allocated_bytes, event.forecast_reserved_bytes)
    measured = _sizes(event.peak_allocated_bytes, event.peak_reserved_bytes)
    result = f"; at the failure: {measured}" if measured else ""
    return f"{event.message.rstrip('.')}. The plan expected at most {expected} in phase {event.phase}{result}."


def _sizes(allocated: int | None, reserved: int | None) -> str:
    sizes = {"allocated": allocated, "reserved": reserved}
    return " and ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items() if size is not None)
