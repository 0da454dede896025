"""Trainer callback: `step` events, stop requests, end of diverged runs."""

from __future__ import annotations

import math
import os
import signal
import time
from typing import Any

from transformers import TrainerCallback

from finetune.card.card import has_windows_driver
from finetune.distributed import all_reduce_max
from finetune.errors import FinetuneError, RecipeError
from finetune.events import Compiled, EventWriter, Memory, Step
from finetune.layers.compiled import Compilations
from finetune.run.best import best_of, best_sealed, evaluations, since_best, unusable_best_message
from finetune.run.directory import RunDirectory, read_stop_requests
from finetune.run.memory import MemorySampler, compare_with_forecast, excess_warning
from finetune.run.training import RunTrainer
from finetune.units import MIB, format_bytes

_COMPARED_STEP = 2  # the first step with optimizer states in memory; `LongestEarly` puts the longest row into step 2
_CHECKED_STEPS = 10  # enough to run every kind of layer: not every batch has an image, or a token for each expert
_COLLAPSED_STEPS = 8  # consecutive steps
_FINISH = 1  # request to end the run with its best step as the result. SIGHUP's number is free: runs ignore SIGHUP
_REPORTED_GROWTH_BYTES = 512 * MIB  # of other programs
_MOST_SKIPPED_STEPS = 20  # fp16's loss scale starts at 65536 and halves per skipped step: it reaches 1 after 16


class NothingLeftToTrain(Exception):
    """Raised when the checkpoint to resume from is the last step's."""


class StopRequest:
    """SIGTERM, SIGINT or a request file: stop after the optimizer step."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.signal: int | None = None
        self.is_finish_requested = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._remember_first)

    def agreed(self) -> int | None:
        """Return the signal of any rank and set `is_finish_requested`; all ranks call this after the same step."""
        first_signal = self.signal or next(iter(read_stop_requests(self._run)), 0)
        agreed = all_reduce_max(first_signal or (_FINISH if self._run.finish_request.exists() else 0))
        self.is_finish_requested = agreed == _FINISH
        self.signal = agreed if agreed > _FINISH else None
        return self.signal

    def _remember_first(self, number: int, _frame: Any) -> None:
        self.signal = self.signal or number


def require_gradients(model: Any) -> None:
    """Raise RecipeError for adapters that the model bypasses: no gradient, though the module ran."""
    has_gradient: dict[tuple[str, ...], bool] = {}  # by path of the adapted module
    for name, parameter in model.named_parameters():
        if ".lora_B." in name and parameter.requires_grad:
            has_gradient[tuple(name.partition(".lora_B.")[0].split("."))] = parameter.grad is not None
    bypassed = [path for path in has_gradient if not has_gradient[path] and _module_ran(path, has_gradient)]
    if bypassed:
        other_names = {path[-1] for path in has_gradient} - {path[-1] for path in bypassed}
        path = ".".join(bypassed[0])
        problem = f"target_modules: the adapter of {path} gets no gradient (one of {len(bypassed)} such adapters)"
        fix = f"Leave the name out: target_modules=[{','.join(sorted(other_names))}]"
        raise RecipeError(problem, f"The model bypasses the adapter and reads the layer's weight directly. {fix}")


def spill_warning(memory: Memory) -> str:
    """Return a warning when more memory is in use than the GPU has: the Windows driver then spills without an error."""
    reserved, total, others = memory.reserved_bytes, memory.card_total_bytes, memory.other_processes_bytes or 0
    if reserved is None or total is None or reserved + others <= total:
        return ""
    used = f"{format_bytes(reserved + others)} are in use on a GPU with {format_bytes(total)}"
    fix = "Set 'Prefer No Sysmem Fallback' in the NVIDIA control panel, or plan with a smaller memory_budget"
    return f"{used}: the driver spills to host memory. {fix}"


def others_warning(memory: Memory, before: Memory) -> str:
    """Return a warning when other programs use more memory than `before`."""
    grown_bytes = (memory.other_processes_bytes or 0) - (before.other_processes_bytes or 0)
    if grown_bytes < _REPORTED_GROWTH_BYTES:
        return ""
    return f"other programs use {format_bytes(grown_bytes)} more GPU memory than before"


def _module_ran(path: tuple[str, ...], has_gradient: dict[tuple[str, ...], bool]) -> bool:
    # a module that the batch leaves out (an expert, the vision tower, cross-attention) has no gradient in any adapter
    module, layer = path[:-1], path[:-2]
    neighbours = [other for other in has_gradient if other != path and other[:-1] == module]
    # the module's only adapter: look at the whole decoder layer
    if not neighbours and layer and layer[-1].isdigit():
        neighbours = [other for other in has_gradient if other[: len(layer)] == layer]
    return any(has_gradient[other] for other in neighbours)


class RunCallback(TrainerCallback):
    """Emits the events of each step and ends the run."""

    def __init__(self, events: EventWriter, memory: MemorySampler, stop: StopRequest) -> None:
        self._events, self._memory, self._stop = events, memory, stop
        self._step_began_s = 0.0
        self._steps, self._skipped_steps, self._collapsed_steps = 0, 0, 0
        self._first_samples: list[Memory] = []
        self._may_spill, self._last_reported, self._compilations = has_windows_driver(), Memory(), Compilations()
        self.trainer: RunTrainer  # set after construction: the trainer's constructor takes this callback
        self.has_collapsed = False  # the chosen answers have become unlikely
        # each is a message once the run ends for this reason
        self.diverged: str | None = None
        self.stopped_early: str | None = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._step_began_s = time.perf_counter()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        self._require_directory()
        # a long step must not look like a hang to the supervisor
        os.utime(self._events.path)

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._steps += 1
        # FSDP and DeepSpeed keep the gradients in their own shards
        if self._steps <= _CHECKED_STEPS and not self.trainer.plan.settings.launch.shards_weights:
            require_gradients(self.trainer.model)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop on request: pause with a checkpoint, or finish early with an evaluation."""
        self._require_directory()
        if self.trainer.seal_facts.done():
            self.trainer.seal_facts.result()  # raises if a file of the base model can't be read
        # resuming is bit-exact only after a complete optimizer step
        if self._stop.agreed() is not None:
            control.should_save = control.should_training_stop = True
        elif self._stop.is_finish_requested and state.global_step < state.max_steps:
            self.stopped_early = f"ended at step {state.global_step} of {state.max_steps}, on request"
            control.should_training_stop, control.should_evaluate = True, args.eval_strategy != "no"

    def _require_directory(self) -> None:
        if not self._events.path.exists():
            raise FinetuneError(f"{self._events.path.parent} was deleted while the run trained", "Start it again.")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        tokens = self.trainer.take_counts()
        supervised = tokens["supervised"]
        step_s = time.perf_counter() - self._step_began_s
        memory = self._memory.sample()
        self._events.emit(Step(
            step=state.global_step,
            total_steps=state.max_steps,
            epoch=round(state.epoch or 0.0, 6),
            loss=logs["loss"],
            learning_rate=logs.get("learning_rate"),
            grad_norm=logs.get("grad_norm"),
            token_accuracy=tokens["correct"] / supervised if tokens["correct"] is not None and supervised else None,
            supervised_tokens=supervised,
            real_tokens=tokens["real"],
            padded_tokens=tokens["padded"],
            metrics=self.trainer.method.metrics(tokens),
            step_s=step_s,
            tokens_per_s=tokens["real"] / step_s if tokens["real"] and step_s > 0 else None,
            **vars(memory),
            **self._memory.sensors(),
        ))  # fmt: skip
        self._memory.reset_peak()
        self._report_compiling(state.global_step)
        if self._may_spill and (message := spill_warning(memory)):
            self._may_spill = False  # one warning is enough
            self._events.warn(message)
        if self._last_reported.other_processes_bytes is None:
            self._last_reported = memory
        elif message := others_warning(memory, self._last_reported):
            self._last_reported = memory
            self._events.warn(message)
        self._check_finite(state.global_step, logs)
        self._check_collapse(state.global_step, tokens)
        if self.diverged:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False
        self._compare_with_forecast(state, memory)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Set the best step of a resumed run: the best whose checkpoint is intact."""
        if state.global_step > 0:
            evaluated = evaluations(state.log_history)
            self.trainer.best, lowest = best_sealed(evaluated, self.trainer.run), best_of(evaluated)
            if lowest is not None and lowest != self.trainer.best:
                self._events.warn(unusable_best_message(lowest.step, "missing or damaged"))

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # when resumed from the last step, transformers compares it with max_steps only after training one more step
        if state.global_step >= state.max_steps:
            raise NothingLeftToTrain

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save the best step; stop when the recipe's patience is exhausted."""
        evaluated, best = evaluations(state.log_history), self.trainer.best
        newest = best_of(evaluated[-1:])  # None without a finite loss
        is_best = newest is not None and (best is None or newest.loss < best.loss)
        if is_best:
            self.trainer.best = newest
        if state.global_step >= state.max_steps or self._stop.is_finish_requested:  # the adapter is saved next
            return
        control.should_save |= is_best and state.global_step > 0  # step 0 is the base adapter
        patience, waited = self.trainer.plan.settings.early_stopping_patience, since_best(evaluated)
        if patience and waited >= patience:
            reason = f"after {waited} evaluations without a lower held-out loss"
            self.stopped_early = f"stopped early at step {state.global_step} of {state.max_steps}, {reason}"
            control.should_training_stop = True
            control.should_save = False  # resuming from this step's checkpoint would train on

    def _report_compiling(self, step: int) -> None:
        compilations, breaks_before = self._compilations, self._compilations.graph_breaks
        if not self.trainer.plan.settings.torch_compile or not compilations.update():
            return
        self._events.emit(Compiled(step=step, **vars(compilations)))
        if compilations.graph_breaks > breaks_before:
            self._events.warn(f"torch_compile: the layers are not one graph each: {compilations.graph_breaks} graph breaks")

    def _compare_with_forecast(self, state: Any, memory: Memory) -> None:
        # a resumed run starts past this step
        if state.global_step > _COMPARED_STEP:
            return
        self._first_samples.append(memory)
        if state.global_step == min(_COMPARED_STEP, state.max_steps):
            check = compare_with_forecast(self.trainer.plan, self._first_samples, at="first steps", step=state.global_step)
            self._events.emit(check)
            if message := excess_warning(self.trainer.plan, check):
                self._events.warn(message)

    def _check_finite(self, step: int, logs: dict[str, Any]) -> None:
        skipped = self.trainer.accelerator.optimizer_step_was_skipped
        self._skipped_steps = self._skipped_steps + 1 if skipped else 0
        for name in ("loss", "grad_norm"):
            value = logs.get(name)
            # fp16's loss scaler skips steps with infinite gradients until its scale fits
            if skipped and name == "grad_norm" and self._skipped_steps < _MOST_SKIPPED_STEPS:
                continue
            if value is not None and not math.isfinite(value):
                self.diverged = f"{name} is {value} at step {step}."

    def _check_collapse(self, step: int, counts: dict[str, Any]) -> None:
        # preference losses only push rejected answers below chosen ones: both can become unlikely
        collapse = self.trainer.method.collapse(counts)
        self._collapsed_steps = self._collapsed_steps + 1 if collapse else 0
        self.has_collapsed = self._collapsed_steps >= _COLLAPSED_STEPS
        if self.has_collapsed and self.diverged is None:
            weight = " or sft_weight=1" if "sft_weight" in self.trainer.plan.settings.training_method.settings else ""
            self.diverged = f"at step {step} {collapse}; set a higher beta{weight}."
