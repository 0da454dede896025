"""`MemoryCallback`: forecast and measured memory of a trainer."""

from __future__ import annotations

import sys
from typing import Any

import torch
from transformers import TrainerCallback

from finetune.api.forecasts import Fit, fits
from finetune.errors import DoesNotFit
from finetune.planner.plan import Verdict
from finetune.units import format_bytes

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
            raise DoesNotFit([str(fit)], f"{_memory_advice(args)}. To try it anyway: MemoryCallback(trainer, refuse=False).")
        self._print_on_main_process(state, f"forecast {fit}")
        self._explain_out_of_memory()
        if torch.cuda.is_available():  # the peak of loading may be higher than a step's
            torch.cuda.reset_peak_memory_stats()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        vars(self._trainer).pop("training_step", None)  # `_explain_out_of_memory` shadows the class's method with an attribute

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step - self._first_step != _MEASURED_AFTER or self.fit is None or not torch.cuda.is_available():
            return
        self.measured_bytes = torch.cuda.max_memory_allocated()
        forecast = self.fit.forecast.peaks["train"]
        self._print_on_main_process(
            state, f"allocated {format_bytes(self.measured_bytes)}, forecast {format_bytes(forecast)} ({self.error:+.2%})"
        )

    def _explain_out_of_memory(self) -> None:
        self.on_train_end()  # of an earlier training, which raised before its end
        training_step = self._trainer.training_step

        def explained_step(*arguments: Any, **named: Any) -> Any:
            try:
                return training_step(*arguments, **named)
            except torch.OutOfMemoryError:
                print(f"finetune: {self._explanation()}", file=sys.stderr)  # noqa: T201
                raise

        self._trainer.training_step = explained_step

    def _explanation(self) -> str:
        forecast = format_bytes(self.fit.forecast.peaks["train"]) if self.fit else "nothing"
        advice = f"{_memory_advice(self._trainer.args)}."
        if not torch.cuda.is_available():
            return f"out of memory; the step was forecast to allocate {forecast}. {advice}"
        free, total = torch.cuda.mem_get_info()
        # mem_get_info counts the CUDA context and other processes together
        others = format_bytes(total - free - torch.cuda.memory_reserved())
        allocated = format_bytes(torch.cuda.memory_allocated())
        return (
            f"out of memory: {allocated} allocated of {forecast} forecast for the step, {format_bytes(free)} free; "
            f"other processes and the CUDA context use {others}. {advice}"
        )

    def _print_on_main_process(self, state: Any, message: str) -> None:
        if state.is_world_process_zero:
            print(f"finetune: {message}", file=sys.stderr)  # noqa: T201


def _memory_advice(args: Any) -> str:
    if not args.activation_checkpointing:
        return "Set activation_checkpointing=True"
    rows = args.per_device_train_batch_size
    if rows > 1:  # same effective batch: the smallest divisor of the micro-batch moves to gradient accumulation
        factor = next(divisor for divisor in range(2, rows + 1) if rows % divisor == 0)
        steps = args.gradient_accumulation_steps * factor
        return f"Set per_device_train_batch_size={rows // factor} and gradient_accumulation_steps={steps}"
    return "Lower max_length, or use 4-bit weights"
