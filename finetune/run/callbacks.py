"""From trainer callbacks to events: one `step` event per optimizer step, stop requests, and the end of a diverged run."""

from __future__ import annotations

import math
import os
import signal
import statistics
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from finetune.compat.torch import set_rates
from finetune.distributed.ranks import highest
from finetune.events import RunWarning, Step
from finetune.run.accuracy import against_forecast, refuse_surprise
from finetune.run.memory_watch import MemoryWatch

if TYPE_CHECKING:
    from finetune.events import EventWriter
    from finetune.run.memory import MemorySampler
    from finetune.run.training import RunTrainer


_SPIKE_WINDOW = 5  # losses that the watchdog compares with
_MOST_SKIPPED_STEPS = 20  # fp16's scale starts at 65536 and halves each time; after 16 it is 1


class StopRequest:
    """SIGTERM and SIGINT ask for a stop after the running optimizer step; the first one is remembered."""

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember)

    def agreed(self) -> int | None:
        """The signal, when any of the processes that train together has got one; all ask after the same step."""
        self.signal = highest(self.signal or 0) or None
        return self.signal

    def _remember(self, number: int, frame: Any) -> None:
        self.signal = self.signal or number


class RunCallback(TrainerCallback):
    """Emits what happened at each step. The run's end is decided here, the saving is the trainer's."""

    def __init__(self, events: EventWriter, memory: MemorySampler, stop: StopRequest) -> None:
        self._events, self._memory, self._stop = events, memory, stop
        self._began, self._skipped_steps = 0.0, 0
        self._watch, self._losses = MemoryWatch(), deque[float](maxlen=_SPIKE_WINDOW)
        self.spike: str | None = None
        self.trainer: RunTrainer | None = None
        self.diverged: str | None = None
        self._compared = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Start the step's clock."""
        self._began = time.perf_counter()

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A sign of life between optimizer steps, for steps that take long."""
        os.utime(self._events.path)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A requested stop saves first: the step is whole, so that resuming is exact."""
        if self._stop.agreed() is not None:
            control.should_save = control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Loss and gradient norm are known here; the trainer has waited for the device already."""
        if not logs or "loss" not in logs or self.trainer is None:
            return
        tokens = self.trainer.take_token_counts()
        step_s = time.perf_counter() - self._began
        memory = self._memory.sample()
        self._events.emit(Step(
            step=state.global_step,
            total_steps=state.max_steps,
            epoch=round(state.epoch or 0.0, 6),
            loss=logs["loss"],
            learning_rate=logs.get("learning_rate"),
            grad_norm=logs.get("grad_norm"),
            token_accuracy=logs.get("mean_token_accuracy"),
            supervised_tokens=tokens["supervised"],
            real_tokens=tokens["real"],
            padded_tokens=tokens["padded"],
            step_s=step_s,
            tokens_per_s=tokens["real"] / step_s if tokens["real"] and step_s > 0 else None,
            **vars(memory),
            **self._memory.sensors(),
        ))  # fmt: skip
        self._memory.reset_peak()
        for message in self._watch.step(memory, step_s):
            self._events.emit(RunWarning(message=message))
        self._check_finite(state.global_step, logs, control)
        self._check_spike(state.global_step, logs["loss"], control)
        if not self._compared:
            self._compared = True
            check = against_forecast(self.trainer.plan, memory, at="first step", step=state.global_step)
            self._events.emit(check)
            refuse_surprise(self.trainer.plan, check)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A resumed schedule comes with the sealed learning rate; the plan's may have been lowered since."""
        if self.trainer is None or state.global_step == 0:
            return
        rate = args.learning_rate
        optimizer: Any = self.trainer.optimizer
        for group in optimizer.param_groups:
            if group.get("initial_lr", rate) != rate:
                group["lr"], group["initial_lr"] = group["lr"] * rate / group["initial_lr"], rate
        set_rates(self.trainer.lr_scheduler, rate, [group["lr"] for group in optimizer.param_groups])

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Between epochs only what lives on is allocated: the moment to see a leak."""
        for message in self._watch.epoch(self._memory.sample()):
            self._events.emit(RunWarning(message=message))

    def _check_spike(self, step: int, loss: float, control: Any) -> None:
        """Opt-in watchdog: a loss far over its recent median ends the attempt, unsaved."""
        factor = self.trainer.plan.settings.loss_spike_factor if self.trainer is not None else None
        if factor is not None and len(self._losses) == _SPIKE_WINDOW and math.isfinite(loss):
            usual = statistics.median(self._losses)
            if loss > factor * usual:
                self.spike = f"loss {loss:.4g} at step {step} is {loss / usual:.1f} times the usual {usual:.4g}"
                control.should_training_stop = True
                control.should_save = control.should_evaluate = False
        self._losses.append(loss)

    def _check_finite(self, step: int, logs: dict[str, Any], control: Any) -> None:
        """A step that fp16's scaler skipped changed nothing; it is no divergence until the scaler gives up."""
        skipped = self.trainer is not None and self.trainer.accelerator.optimizer_step_was_skipped
        self._skipped_steps = self._skipped_steps + 1 if skipped else 0
        for name in ("loss", "grad_norm"):
            value = logs.get(name)
            if skipped and name == "grad_norm" and self._skipped_steps < _MOST_SKIPPED_STEPS:
                continue
            if value is not None and not math.isfinite(value):
                self.diverged = f"{name} is {value} at step {step}"
                control.should_training_stop = True
                control.should_save = control.should_evaluate = False
