"""One attempt at a run, without the supervisor and its retries: `python -m benchmarks.gpu.attempt RUN RESULT [--peft-cast]`.

The process is the worker. RESULT gets the memory by phase, which the run's events lack.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from finetune.events import Memory
from finetune.run.directory import RunDirectory
from finetune.run.memory import MemorySampler
from finetune.run.worker import Worker

PEAKS = ("peak_allocated_bytes", "peak_reserved_bytes")


class Phases(TrainerCallback):
    """Peak allocated and reserved bytes within forward (with loss), backward and optimizer, and the bytes in use on the whole
    GPU at their ends, which are a peak as long as torch releases nothing. On a CPU the process's RSS.

    Resets torch's peaks between phases. The run's own sampler still has the peak of the whole step.
    """

    def __init__(self, memory: MemorySampler) -> None:
        self.peaks: dict[str, dict[str, int]] = {}
        self._sample, self._reset = memory.sample, memory.reset_peak
        self._earlier = dict.fromkeys(PEAKS, 0)
        memory.sample, memory.reset_peak = self.sample_step, self.reset_step

    def end(self, phase: str) -> None:
        """End a phase: note its peaks and reset them."""
        sample = self._sample()
        now = {"process_rss_bytes": sample.process_rss_bytes}
        if sample.peak_allocated_bytes is not None:
            self._earlier = {name: max(value, getattr(sample, name)) for name, value in self._earlier.items()}
            now = {name.removeprefix("peak_"): getattr(sample, name) for name in PEAKS}
            now |= {"card_used_bytes": sample.card_used_bytes} if sample.card_used_bytes else {}
            self._reset()
        before = self.peaks.setdefault(phase, now)
        self.peaks[phase] = {name: max(value, before[name]) for name, value in now.items()}

    def sample_step(self) -> Memory:
        """A sample with the peaks that were reset here."""
        sample = self._sample()
        if sample.peak_allocated_bytes is None:
            return sample
        return dataclasses.replace(sample, **{name: max(getattr(sample, name), self._earlier[name]) for name in PEAKS})

    def reset_step(self) -> None:
        """A new step begins."""
        self._earlier = dict.fromkeys(PEAKS, 0)
        self._reset()

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
        trainer.add_callback(self)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After the optimizer, before the gradients are freed."""
        self.end("optimizer")


class MeasuredWorker(Worker):
    """The worker, with the phases of its steps watched and PEFT's cast of inputs switched on if wanted."""

    def __init__(self, run: RunDirectory, peft_cast: bool) -> None:
        super().__init__(run)
        self.peft_cast, self.phases = peft_cast, Phases(self.memory)

    def _build(self) -> tuple[Any, Any]:
        trainer, callback = super()._build()
        if self.peft_cast:
            restore_cast(trainer.model)
        self.phases.watch(trainer)
        return trainer, callback


def restore_cast(model: Any) -> None:
    """Have PEFT cast the inputs of its layers to fp32, as it does by itself (finetune.compat.peft.leave_casts_to_autocast).

    Raises RuntimeError when nothing had switched it off.
    """
    layers = [module for module in model.modules() if "_cast_input_dtype" in vars(module)]
    if not layers:
        raise RuntimeError("not available: PEFT's cast of inputs is not switched off here")
    for layer in layers:
        del layer._cast_input_dtype


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


def main() -> int:
    """Run the attempt; returns the worker's exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--peft-cast", action="store_true")
    options = parser.parse_args()
    worker = MeasuredWorker(RunDirectory(options.run), options.peft_cast)
    code = worker.main()
    options.result.write_text(json.dumps({"phases": worker.phases.peaks, "allocator": allocator()}))
    gc.freeze()
    return code


if __name__ == "__main__":
    sys.exit(main())
