"""Memory by phase of a training step, and its speed, beside what the run's own events have."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.gpu import card_watch

NAMES = ("allocated_bytes", "reserved_bytes")


class Phases:
    """Highest allocated and reserved bytes within forward (with loss), backward and optimizer, and what is in use on the whole
    card at their ends, which is the most as long as torch gives nothing back. On a CPU host RSS.

    Resets torch's peaks between phases. A run's own sampler, given to `around`, still sees the peak of the whole step.
    """

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self.peaks: dict[str, dict[str, int]] = {}
        self._earlier = dict.fromkeys(NAMES, 0)

    def end(self, phase: str) -> None:
        """End a phase: note its peaks and reset them."""
        if not self.on_cuda:
            import psutil

            now = {"process_rss_bytes": psutil.Process().memory_info().rss}
        else:
            now = self._peaks()
            self._earlier = {name: max(value, now[name]) for name, value in self._earlier.items()}
            now |= card_watch.used_here()
            torch.cuda.reset_peak_memory_stats()
        before = self.peaks.setdefault(phase, now)
        self.peaks[phase] = {name: max(value, before[name]) for name, value in now.items()}

    def watch(self, trainer: Any) -> None:
        """End a phase after each forward, backward and optimizer step of `trainer`."""
        compute_loss, backward = trainer.compute_loss, trainer.accelerator.backward

        def forward_and_loss(*arguments: Any, **named: Any) -> Any:
            loss = compute_loss(*arguments, **named)
            self.end("forward" if torch.is_grad_enabled() else "evaluate")
            return loss

        def backward_and_end(*arguments: Any, **named: Any) -> None:
            backward(*arguments, **named)
            self.end("backward")

        trainer.compute_loss, trainer.accelerator.backward = forward_and_loss, backward_and_end
        trainer.add_callback(_OptimizerStep(self))

    def around(self, memory: Any) -> None:
        """Have a run's MemorySampler report peaks that were reset here."""
        sample, reset_peak = memory.sample, memory.reset_peak

        def whole() -> Any:
            sampled = sample()
            if sampled.peak_allocated_bytes is None:
                return sampled
            higher = {f"peak_{name}": max(getattr(sampled, f"peak_{name}"), self._earlier[name]) for name in NAMES}
            return dataclasses.replace(sampled, **higher)

        def reset() -> None:
            self._earlier = dict.fromkeys(NAMES, 0)
            reset_peak()

        memory.sample, memory.reset_peak = whole, reset

    def _peaks(self) -> dict[str, int]:
        stats = torch.cuda.memory_stats()
        return {name: stats.get(f"{name}.all.peak", 0) for name in NAMES}


class _OptimizerStep(TrainerCallback):
    """Ends the phase of the optimizer."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the optimizer, before the gradients are freed."""
        self._phases.end("optimizer")


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step, the device synchronised, for a trainer that writes no events."""

    def __init__(self) -> None:
        self.step_s: list[float] = []
        self.losses: list[float] = []
        self._began = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The clock starts."""
        synchronise()
        self._began = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The clock stops."""
        synchronise()
        self.step_s.append(time.perf_counter() - self._began)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Keep the loss."""
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))


def synchronise() -> None:
    """Wait for the card, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allocator() -> dict[str, Any]:
    """The cap of this process and the allocator's counts; empty on a CPU."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    stats, fraction = torch.cuda.memory_stats(), torch.cuda.get_per_process_memory_fraction()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return {
        "cap_share": fraction, "cap_bytes": round(fraction * total), "num_ooms": stats.get("num_ooms"),
        "num_alloc_retries": stats.get("num_alloc_retries"), "cards_used": torch.cuda.device_count(),
    }  # fmt: skip
