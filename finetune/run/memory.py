"""Memory of the training process: torch's allocator, the whole GPU, host memory (RSS). Compared with the forecast."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import psutil

from finetune.card import cuda, nvidia
from finetune.card.measured import record_measurement
from finetune.card.nvidia import DriverError, OpenDevice
from finetune.events import Evaluation, Event, ForecastCheck, Memory, Step, newest
from finetune.planner.history import record_run, seconds_spent
from finetune.planner.plan import Plan, Verdict
from finetune.system import peak_rss_bytes
from finetune.units import format_bytes, format_seconds


class MemorySampler:
    """Samples memory in well under a millisecond."""

    def __init__(self, on_cuda: bool) -> None:
        self._process = psutil.Process()
        self._on_cuda = on_cuda

    @cached_property
    def _gpu(self) -> OpenDevice | None:
        with contextlib.suppress(DriverError):
            return nvidia.open_device(cuda.uuid()) if self._on_cuda else None
        return None

    def sample(self) -> Memory:
        """Return current bytes, and peak bytes since `reset_peak`."""
        return Memory(
            process_rss_bytes=self._process.memory_info().rss, process_peak_rss_bytes=peak_rss_bytes(),
            **(cuda.allocator_bytes() if self._on_cuda else {}), **(_whole_gpu(self._gpu) if self._gpu else {}),
        )  # fmt: skip

    def sensors(self) -> dict[str, Any]:
        values, gpu = {}, self._gpu
        if gpu is not None:
            for name, read in {"temperature_c": gpu.temperature_c, "power_w": gpu.power_w}.items():
                with contextlib.suppress(DriverError):  # not every GPU has every sensor
                    values[name] = read()
        return values

    def reset_peak(self) -> None:
        if self._on_cuda:
            cuda.reset_peak()


def _whole_gpu(device: OpenDevice) -> dict[str, int | None]:
    try:
        total, _, used = device.memory()
    except DriverError:
        return {}
    other_processes_bytes, bytes_by_pid = None, None
    with contextlib.suppress(DriverError):
        bytes_by_pid = device.memory_of_processes()
    if bytes_by_pid and os.getpid() in bytes_by_pid:  # in a container the driver reports the host's process ids
        sizes = [size for pid, size in bytes_by_pid.items() if pid != os.getpid()]
        other_processes_bytes = None if None in sizes else sum(size or 0 for size in sizes)
    # without the driver's reserve, as torch counts
    return {"card_used_bytes": used, "card_total_bytes": total, "other_processes_bytes": other_processes_bytes}


MARGIN = 0.10  # excess over the forecast, as a share, from which a warning is emitted
_WARM_UP_STEPS = 2


def compare_with_forecast(plan: Plan, samples: Sequence[Memory], *, at: str, step: int) -> ForecastCheck:
    """Return forecast and measured bytes; None for unmeasured values."""
    forecast, card = plan.forecast, plan.card
    predicted_peak = forecast.peak_bytes if forecast else None
    used_by_others = None if card.is_cpu else card.total_bytes - card.free_bytes
    # median: a program that starts between the driver's two answers would count as context
    contexts = [size for sample in samples if (size := sample.context_bytes) and size > 0]
    return ForecastCheck(
        at=at, step=step, predicted_allocated_bytes=forecast.allocated_bytes if forecast else None,
        measured_allocated_bytes=_highest(samples, "peak_allocated_bytes"), predicted_peak_bytes=predicted_peak,
        predicted_low_bytes=forecast.peak_low_bytes if forecast else None,
        predicted_high_bytes=forecast.peak_high_bytes if forecast else None,
        measured_card_bytes=_highest(samples, "process_peak_rss_bytes" if card.is_cpu else "own_card_bytes"),
        measured_reserved_bytes=_highest(samples, "peak_reserved_bytes"),
        predicted_reserved_bytes=forecast.of_phase("train").reserved_bytes if forecast else None,
        predicted_context_bytes=card.context_bytes or None,
        measured_context_bytes=int(statistics.median(contexts)) if contexts else None,
        predicted_other_processes_bytes=used_by_others,
        measured_other_processes_bytes=_highest(samples, "other_processes_bytes"),
        predicted_card_used_bytes=None if used_by_others is None or predicted_peak is None else predicted_peak + used_by_others,
        measured_card_used_bytes=_highest(samples, "card_used_bytes"),
    )  # fmt: skip


def _highest(samples: Sequence[Memory], name: str) -> int | None:
    return max((size for sample in samples if (size := getattr(sample, name)) is not None), default=None)


def excess_warning(plan: Plan, check: ForecastCheck) -> str | None:
    """Return a warning when the run allocated far more than forecast."""
    measured, predicted = check.measured_allocated_bytes, check.predicted_allocated_bytes
    # the budget limits the allocator, so the run still fits it; NO_FIT: started with --force
    if not measured or not predicted or measured <= (1 + MARGIN) * predicted or plan.verdict == Verdict.NO_FIT:
        return None
    return (
        f"the first steps allocated {format_bytes(measured)}, but the forecast was "
        f"{format_bytes(predicted)} ({measured / predicted - 1:+.0%}); it still fits the budget of "
        f"{format_bytes(plan.usable_bytes)}. This is a bug in the forecast: please report it with plan.json."
    )


def record_measurements(plan: Plan, check: ForecastCheck, steps: list[Step]) -> None:
    """Record times, memory and CUDA context for later plans. Raises OSError."""
    warm_steps_s = [step.step_s for step in steps[_WARM_UP_STEPS:] if step.step_s]
    record_run(plan, check, step_s=statistics.median(warm_steps_s) if warm_steps_s else None)
    if check.measured_context_bytes:
        record_measurement(plan.card.name, check.measured_context_bytes)


def outcome(events: Sequence[Event]) -> tuple[str, bool]:
    """Return a line of duration, peak and losses, and whether the peak missed its forecast interval."""
    sentences, outside = [format_seconds(seconds_spent(events))], ""
    check = newest(ForecastCheck, events)
    if check and (peak := check.measured_peak_bytes) and (forecast := check.predicted_peak_bytes):
        lower, upper = check.predicted_low_bytes or 0, check.predicted_high_bytes or peak
        if not lower <= peak <= upper:
            outside = f", outside its interval, {format_bytes(lower)} to {format_bytes(upper)}"
        sentences.append(f"Peak {format_bytes(peak)}, forecast {format_bytes(forecast)} ({peak / forecast - 1:+.1%}{outside})")
    losses = [event.loss for event in events if isinstance(event, Step) and event.loss is not None]
    held_out = [event.eval_loss for event in events if isinstance(event, Evaluation) and event.eval_loss is not None]
    if losses:
        lowest_held_out = f", held out {min(held_out):.3g}" if held_out else ""
        sentences.append(f"Loss {losses[0]:.3g} -> {losses[-1]:.3g}{lowest_held_out}")
    return f"{'. '.join(sentences)}.", bool(outside)
