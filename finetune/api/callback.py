"""`MemoryCallback`: a trainer refuses a step that can't fit, shows forecast beside measured, and explains out of memory."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import TrainerCallback

from finetune.api.forecasts import Fit, fits
from finetune.compat.torch import on_out_of_memory
from finetune.compat.transformers import checkpointing_name
from finetune.errors import DoesNotFit
from finetune.planner.plan import Verdict
from finetune.units import format_bytes

#: Steps after which peaks are those of a usual step: the second has the optimizer's states.
_MEASURED_AFTER = 2


class MemoryCallback(TrainerCallback):
    """Forecast before the first step and beside what was measured: `trainer.add_callback(finetune.MemoryCallback(trainer))`.

    `gpu`: as for `finetune.fits`. Where even the lower end of the forecast exceeds what is free, training raises DoesNotFit
    before its first step; `refuse=False` only says so. `fit`, `measured_bytes` and `error` (allocated: measured / forecast - 1)
    stay readable. Messages go to stderr, from the first process only.
    """

    def __init__(self, trainer: Any, gpu: str | None = None, *, refuse: bool = True) -> None:
        self._trainer, self._gpu, self._refuse = trainer, gpu, refuse
        self._first_step = 0
        self.fit: Fit | None = None
        self.measured_bytes: int | None = None

    @property
    def error(self) -> float | None:
        """What training allocated beside the forecast; None before the second step and on a CPU."""
        if self.fit is None or self.measured_bytes is None:
            return None
        return self.measured_bytes / self.fit.forecast.peaks["train"] - 1

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Forecast the step. Raises DoesNotFit."""
        self._first_step = state.global_step
        self.fit = fit = fits(self._trainer, self._gpu)
        if fit.verdict == Verdict.NO_FIT and self._refuse:
            raise DoesNotFit([str(fit)], f"{_smaller(args)}. To try it anyway: MemoryCallback(trainer, refuse=False).")
        self._say(state, f"forecast {fit}")
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
            on_out_of_memory(self._explain)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """After two steps: allocated memory beside its forecast."""
        if state.global_step - self._first_step != _MEASURED_AFTER or self.fit is None or not torch.cuda.is_available():
            return
        self.measured_bytes = torch.cuda.max_memory_allocated()
        forecast = self.fit.forecast.peaks["train"]
        self._say(
            state, f"allocated {format_bytes(self.measured_bytes)}, forecast {format_bytes(forecast)} ({self.error:+.2%})"
        )

    def _explain(self, device: int, asked: int, total: int, free: int) -> None:
        """Called by torch where it is out of memory, before it raises."""
        forecast = self.fit.forecast.peaks["train"] if self.fit else 0
        taken = total - free - torch.cuda.memory_reserved(device)
        print(  # noqa: T201
            f"finetune: out of memory on GPU {device}: {format_bytes(asked)} asked for, {format_bytes(free)} free; "
            f"{format_bytes(torch.cuda.memory_allocated(device))} allocated of {format_bytes(forecast)} forecast; "
            f"{format_bytes(taken)} taken by other processes and the CUDA context. {_smaller(self._trainer.args)}.",
            file=sys.stderr,
        )

    def _say(self, state: Any, message: str) -> None:
        if state.is_world_process_zero:
            print(f"finetune: {message}", file=sys.stderr)  # noqa: T201


def _smaller(args: Any) -> str:
    """What of a trainer's arguments would need less memory."""
    name = checkpointing_name()
    if not getattr(args, name):
        return f"Set {name}=True"
    if args.per_device_train_batch_size > 1:
        half = args.per_device_train_batch_size // 2
        steps = args.gradient_accumulation_steps * 2
        return f"Set per_device_train_batch_size={half} and gradient_accumulation_steps={steps}"
    return "Shorten max_length, or take 4-bit weights"
