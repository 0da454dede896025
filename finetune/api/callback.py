"""`MemoryCallback`: forecast and measured memory of a trainer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from finetune.api.forecasts import Fit, fits
from finetune.errors import DoesNotFit
from finetune.planner.plan import Verdict
from finetune.units import format_bytes

if TYPE_CHECKING:
    pass


_MEASURED_AFTER = 2  # steps before the peak is read: the optimizer allocates its states at the end of the first


class MemoryCallback(TrainerCallback):
    """Refuse training that can't fit, and print forecast and measured memory.

    `trainer.add_callback(finetune.MemoryCallback(trainer))`. `gpu` as in `finetune.fits`; `refuse=False` only prints.
    """

    def __init__(self, trainer: Any, gpu: str | None = None, *, refuse: bool = True) -> None:
        self._trainer, self._gpu, self._refuse = trainer, gpu, refuse
        self._first_step = 0
        self.fit: Fit | None = None  # the forecast; None before training starts
        self.measured_bytes: int | None = None  # peak of allocated memory in the first two steps

    @property
    def error(self) -> float | None:
        """Return measured / forecast - 1; None before the second step and on a CPU."""
        if self.fit is None or self.measured_bytes is None:
            return None
        return self.measured_bytes / self.fit.forecast.peaks["train"] - 1

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._first_step = state.global_step  # not 0 when training resumes
        self.fit = fit = fits(self._trainer, self._gpu)
        if fit.verdict == Verdict.NO_FIT and self._refuse:  # the likely peak exceeds the free memory
            smaller = "Set activation_checkpointing=True, lower the micro-batch or max_length, or use 4-bit weights."
            raise DoesNotFit([str(fit)], f"{smaller} To try it anyway: MemoryCallback(trainer, refuse=False).")
        self._print_on_main_process(state, f"forecast {fit}")
        if torch.cuda.is_available():  # the peak of loading may be higher than a step's
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step - self._first_step != _MEASURED_AFTER or self.fit is None or not torch.cuda.is_available():
            return
        self.measured_bytes = torch.cuda.max_memory_allocated()
        forecast = self.fit.forecast.peaks["train"]
        self._print_on_main_process(
            state, f"allocated {format_bytes(self.measured_bytes)}, forecast {format_bytes(forecast)} ({self.error:+.2%})"
        )

    def _print_on_main_process(self, state: Any, message: str) -> None:
        if state.is_world_process_zero:
            print(f"finetune: {message}", file=sys.stderr)  # noqa: T201
