"""Training process, started by the supervisor: `python -m finetune.run.worker [RUN]`. No other process opens the GPU.

Exit status: 0 finished, 130/143 stopped with a checkpoint, else the status of the error.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import sys
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune import distributed, events
from finetune.card import cuda
from finetune.compat.triton import tune_without_buffer
from finetune.errors import FINISHED, DiskFull, Diverged, FinetuneError, OutOfMemory, is_disk_full, is_out_of_memory
from finetune.model.hybrid import kernel_fallback_notes
from finetune.planner.plan import Plan, plan_was_edited
from finetune.run.base_adapter import base_adapter_of, load_base_adapter
from finetune.run.best import result_summary, save_result
from finetune.run.card import available_bytes, kernel_problem, limit_card, lost_card, open_card, plain_segments_message
from finetune.run.directory import RunDirectory, require_data
from finetune.run.memory import MemorySampler, compare_with_forecast, record_measurements
from finetune.run.retry import adjust, adjusted_plan, adjusted_since_s, next_smaller, out_of_memory_event, reforecast_adjusted
from finetune.run.seal import Checkpoint, deciding_facts, fact_differences, newest_verified, seal_facts
from finetune.run.trackers import Trackers
from finetune.settings.schema import Decides, settings_that_decide
from finetune.system import (
    ignore_hangup,
    keep_private,
    raise_gc_thresholds,
    receive_line,
    redirect_output,
    restore_gc_thresholds,
    take_lock,
)
from finetune.units import format_bytes, printable

if TYPE_CHECKING:
    from finetune.run.training import RunTrainer

_PREDECESSOR_S = 10.0  # time for a killed attempt to exit
_LIBRARIES = ("torch", "transformers", "trl", "peft", "bitsandbytes", "accelerate", "datasets")


class Worker:
    """One attempt at a run."""

    def __init__(self, run: RunDirectory) -> None:
        from finetune.run.callbacks import StopRequest

        self.run, self.plan = run, adjusted_plan(run)
        self.rank = distributed.this_rank()
        distributed.end_with_launcher(self.rank)
        # before a forecast: its dry run may open a CUDA context in this process
        self.available_bytes = available_bytes(self.plan)
        if self.rank.is_local_rank_0:  # only local rank 0 compares memory with the forecast
            self.plan = reforecast_adjusted(run)
        self.stop = StopRequest(run)
        self.events = (
            events.EventWriter(run.events) if self.rank.world_size == 1 else distributed.RankEvents(run.events, self.rank)
        )
        self.trackers = Trackers(self.plan, run, self.events)
        if self.rank.number == 0:
            self.events.listeners.append(self.trackers.on_event)
        self.memory = MemorySampler(on_cuda=not self.plan.card.is_cpu)
        self._kernel_problem = ""  # why Triton's kernels can't run
        self.phase = "load"  # while training, `trainer.phase` is finer
        self.trainer: RunTrainer | None = None

    def main(self) -> int:
        code = self._attempt()
        self.trackers.close(code)
        return code

    def _attempt(self) -> int:
        try:
            self._shrink_to_fit()
            self._open_card()
            return self._train()
        except FinetuneError as error:
            return self._report_failure(error)
        except Exception as error:  # noqa: BLE001 - every failure becomes an event
            traceback.print_exc()
            if is_out_of_memory(error):
                phase = self.trainer.phase if self.trainer is not None and self.phase == "train" else self.phase
                self.events.emit(out_of_memory_event(error, phase, self.plan, self.memory.sample()))
                return OutOfMemory.exit_code
            if is_disk_full(error):
                return self._report_failure(DiskFull(str(error), f"Free some space, then: finetune resume {self.run.path}"))
            return self._report_failure(
                lost_card(self.plan, self.run.path) or FinetuneError(f"{type(error).__name__}: {error}")
            )

    def _report_failure(self, error: FinetuneError) -> int:
        message = " ".join([*error.problems, error.fix]).strip()
        print(f"{error.title}: {printable(message)}", file=sys.stderr)  # noqa: T201 - log.txt is this process's output
        with contextlib.suppress(OSError):  # a full disk: the supervisor emits the state later
            self.events.emit(events.State(state=error.run_state, message=message, exit_code=error.exit_code))
        return error.exit_code

    def _train(self) -> int:
        from finetune.run.callbacks import NothingLeftToTrain

        trainer, callback = self._build_trainer()
        self.trainer = trainer
        if self.plan.settings.packing and not self.plan.settings.launch.shards_weights:
            from finetune.model.padding import require_isolated_examples

            require_isolated_examples(trainer.model, trainer.data_collator)
        checkpoint, skipped = self._checkpoint_to_resume()
        self._announce(trainer, checkpoint, skipped)
        self.phase = "train"
        # step 0 is evaluated where it may be the best: the adapter that training continues from
        continues = self.plan.settings.adapter_name_or_path is not None
        trainer.args.eval_on_start = continues and checkpoint is None and trainer.args.eval_strategy != "no"
        try:
            with contextlib.suppress(NothingLeftToTrain):
                trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
        finally:
            trainer.finish_sealing()
        if callback.diverged:
            raise Diverged(callback.diverged, self._divergence_advice(collapsed=callback.has_collapsed))
        step = trainer.state.global_step
        if self.stop.signal is not None and step < trainer.state.max_steps and not callback.stopped_early:
            message = f"paused at step {step} with a checkpoint; resume with: finetune resume {self.run.path}"
            code = 128 + self.stop.signal
            self.events.emit(events.State(state="paused", message=message, exit_code=code))
            return code
        self.phase, message = "save", ""
        if result := save_result(trainer):
            self.events.emit(result)
            summary = result_summary(result, self.run, trainer.state.max_steps)
            message = f"{callback.stopped_early}; {summary}" if callback.stopped_early else summary
            since_s = adjusted_since_s(self.run)  # earlier steps used other memory settings
            all_steps = (event for event in events.read_events(self.run.events) if isinstance(event, events.Step))
            steps = [step for step in all_steps if (step.time_s or 0) >= since_s]
            if steps:
                check = compare_with_forecast(self.plan, steps, at="end", step=steps[-1].step)
                self.events.emit(check)
                with contextlib.suppress(OSError):  # the run has finished, even if the cache can't be written
                    record_measurements(self.plan, check, steps)
        self.events.emit(events.State(state="finished", message=message, exit_code=FINISHED))
        return FINISHED

    def _build_trainer(self) -> tuple[Any, Any]:
        from datasets import load_from_disk
        from transformers import set_seed

        from finetune.compat.accelerate import keep_fsdp_wrap_policy
        from finetune.compat.peft import save_without_vocabulary
        from finetune.compat.transformers import quiet_libraries
        from finetune.data.tokenizer import read_tokenizer
        from finetune.memory.depth import fewest_layers
        from finetune.model.adapters import attach_adapters, prepare_for_training
        from finetune.model.build import load_base
        from finetune.model.padding import needs_padding_mask
        from finetune.model.techniques import apply_techniques, optimizer_class
        from finetune.model.transformers_config import load_config
        from finetune.planner.resources import check_host_memory
        from finetune.run.callbacks import RunCallback
        from finetune.run.training import RunTrainer, sft_config

        restore_gc_thresholds()
        require_data(self.run)
        check_host_memory(self.plan)
        settings, hashing = self.plan.settings, self._facts  # starts a thread that hashes during loading and the first steps
        quiet_libraries()
        save_without_vocabulary()
        config = load_config(settings)
        needs_mask = settings.vision or (not settings.packing and needs_padding_mask(fewest_layers(config)))
        set_seed(settings.seed)
        if settings.launch.strategy == "fsdp":
            keep_fsdp_wrap_policy()
        began = time.perf_counter()
        device = "cpu" if self.plan.card.is_cpu else cuda.device_of(self.rank.local_rank)
        base = load_base(settings, config, device, self.rank.number)
        tokenizer = read_tokenizer(self.run.data / "tokenizer", settings)
        model = attach_adapters(base, settings, tokenizer)
        apply_techniques(model, settings)
        self._end_load_phase(time.perf_counter() - began)
        callback = RunCallback(self.events, self.memory, self.stop)
        train_rows, held_out = load_from_disk(str(self.run.data / "train")), self.run.data / "eval"
        trainer = RunTrainer(
            plan=self.plan, run=self.run, events=self.events, memory=self.memory,
            seal_facts=hashing, needs_mask=needs_mask, model=model, args=sft_config(self.plan, self.run),
            train_dataset=train_rows,
            eval_dataset=load_from_disk(str(held_out)) if held_out.is_dir() else None,
            processing_class=tokenizer, callbacks=[callback],
            optimizer_cls_and_kwargs=optimizer_class(settings),
        )  # fmt: skip
        callback.trainer = trainer
        # after SFTTrainer, which casts the adapters of a 4-bit model to bf16
        prepare_for_training(trainer.model, settings)  # type: ignore[arg-type]
        if settings.adapter_name_or_path is not None:
            load_base_adapter(trainer.model, self.run)
            trainer.method.copy_reference(trainer.model)
        if settings.torch_compile:
            trainer.plan = self.plan = trainer.compile_or_undo(self._kernel_problem)
        return trainer, callback

    @cached_property
    def _facts(self) -> Future[dict[str, Any]]:
        # of the plan as it is now: compiling may replace it. One process per machine hashes the base model's files
        is_writer = self.rank.is_local_rank_0
        return ThreadPoolExecutor(1, thread_name_prefix="hash").submit(seal_facts, self.plan, self.run, base=is_writer)

    def _checkpoint_to_resume(self) -> tuple[Checkpoint | None, list[str]]:
        checkpoint, skipped = newest_verified(self.run.checkpoints)
        step = distributed.all_reduce_min(checkpoint.step if checkpoint else 0)  # each machine has its own checkpoints
        if checkpoint is not None and checkpoint.step != step:
            checkpoint, older = newest_verified(self.run.checkpoints, before=step + 1)
            skipped += older
        differences = fact_differences(checkpoint.facts, deciding_facts(self._facts.result())) if checkpoint else []
        origin = base_adapter_of(self.run)
        if origin and self._facts.result().get("base", origin.base) != origin.base and origin.base is not None:
            differences.append("the base adapter was trained on other base weights")
        # all ranks must fail together, and only local rank 0 has compared the weights
        if distributed.all_reduce_max(len(differences)):
            action = f"resume from {checkpoint.path.name}" if checkpoint else "continue from the adapter"
            lines = differences or ["another rank has found a difference"]
            raise FinetuneError([f"can't {action}: {line}" for line in lines], "Restore the setting, or start a new run.")
        return checkpoint, skipped

    def _announce(self, trainer: Any, checkpoint: Checkpoint | None, skipped: list[str]) -> None:
        edited = [f"{self.run.plan.name} has changed since it was written"] if plan_was_edited(self.run.plan) else []
        for line in (*skipped, *edited, *kernel_fallback_notes(self.plan.model_type or "", self.plan.card.capability)):
            self.events.warn(line)
        approximate = _why_resume_is_inexact(self.plan, checkpoint.facts if checkpoint else {})
        eval_steps = None if trainer.args.eval_strategy == "no" else int(trainer.args.eval_steps)
        self.events.emit(events.Start(
            version=events.VERSION,
            resumed_from=checkpoint.path.name if checkpoint else None, step=checkpoint.step if checkpoint else 0,
            total_steps=self.plan.total_steps, eval_steps=eval_steps, exact=not approximate,
            approximate_because=tuple(approximate),
            versions={name: version(name) for name in _LIBRARIES},
            trainable_parameters=sum(parameter.numel() for parameter in trainer.model.parameters() if parameter.requires_grad),
            memory_is="process" if self.plan.card.is_cpu else "card",
        ))  # fmt: skip
        self.events.emit(events.State(state="running"))

    def _shrink_to_fit(self) -> None:
        # only for a retry, which follows out of memory
        earlier_events = events.read_events(self.run.events)
        attempts = [event.attempt for event in earlier_events if isinstance(event, events.State) and event.attempt]
        attempt = attempts[-1] if attempts else 1
        if attempt == 1 or self.rank.world_size > 1 or self.plan.card.is_cpu:
            return
        needed_bytes = self.plan.forecast.peak_bytes if self.plan.forecast else 0
        free_bytes, changes = self.available_bytes, dict[str, Any]()
        # each attempt in between would load the model only to run out of memory
        while free_bytes is not None and self.plan.forecast and self.plan.forecast.peak_bytes > free_bytes:
            if (smaller := next_smaller(self.plan, "train")) is None:
                break
            adjust(self.run, smaller)
            changes |= smaller
            self.plan = reforecast_adjusted(self.run)
        if changes:
            reason = f"the forecast needs {format_bytes(needed_bytes)}, {format_bytes(free_bytes or 0)} is free"
            self.events.emit(events.Retry(attempt=attempt, reason=reason, changes=changes))

    def _open_card(self) -> None:
        if self.plan.card.is_cpu:
            return
        open_card(self.plan, self.rank.local_rank)
        if warning := limit_card(self.plan):
            self.events.warn(warning)
        if problem := kernel_problem():
            from finetune.compat.trl import compute_loss_without_triton

            compute_loss_without_triton()
            self.events.warn(f"{problem}; the loss is computed without Triton's kernels, which is slower")
            self._kernel_problem = problem
        else:
            tune_without_buffer()

    def _end_load_phase(self, load_s: float) -> None:
        self.events.emit(events.Phase(phase="load", phase_s=load_s, **vars(self.memory.sample())))
        gc.collect()
        self.memory.reset_peak()
        if not self.plan.card.is_cpu:
            cuda.release_cached()
            if message := plain_segments_message(self.plan):
                self.events.warn(message)

    def _divergence_advice(self, *, collapsed: bool) -> str:
        intact, _ = newest_verified(self.run.checkpoints)
        newest = f"The last good checkpoint is {intact.path.name}." if intact else "There is no checkpoint yet."
        rate = f"learning_rate={self.plan.settings.learning_rate / 4:.2g}"
        may_overflow = self.plan.settings.dtype == "float16" and not collapsed  # float16 ends at 65,504
        changes = f"dtype=float32, or {rate}" if may_overflow else rate
        return f"{newest} Try {changes}. If this was one of the first steps, check the base model's files and the examples."


def _why_resume_is_inexact(plan: Plan, sealed: dict[str, Any]) -> list[str]:
    # `sealed`: the checkpoint's facts; empty on a fresh start
    reasons, world_size = [], plan.settings.launch.num_processes
    sealed_world_size = sealed.get("num_processes", world_size)
    if sealed_world_size != world_size:
        reasons.append(f"the world size is {world_size}, not {sealed_world_size}: same examples, other random numbers")
    if world_size > 2:
        reasons.append("all-reduce may sum the gradients of more than two processes in another order")
    if not plan.card.is_cpu:
        reasons.append("bit-exact resume on a GPU is not measured yet (kernels may sum in another order)")
    if plan.settings.torch_compile:
        reasons.append("compiled kernels may differ after a restart")
    values = plan.settings.model_dump(mode="json")
    compared = [name for name in settings_that_decide(Decides.EXACTNESS) if name in sealed and name != "launch"]
    return reasons + fact_differences({name: sealed[name] for name in compared}, values)


def wait_for_run() -> None:
    """Import libraries, then wait until the standard input names the run; end the process if it names none."""
    # bitsandbytes is not imported: it opens the GPU, whose free memory the plan counts meanwhile
    for name in ("datasets", "torch._dynamo", "transformers.modeling_utils"):
        with contextlib.suppress(Exception):  # the next import fails in the run, which has a log
            importlib.import_module(name)
    if (request := receive_line()) is None:
        sys.exit(0)
    os.environ.update(request["environment"])
    sys.argv.append(request["run"])
    redirect_output(RunDirectory(Path(request["run"])).log)


def main() -> int:
    """Run the training process."""
    ignore_hangup()
    keep_private()
    raise_gc_thresholds()  # imports create many objects that stay; `_build_trainer` restores the thresholds
    if len(sys.argv) == 1:
        wait_for_run()
    run = RunDirectory(Path(sys.argv[1]))
    is_writer = distributed.this_rank().is_local_rank_0
    lock = take_lock(run.worker_lock, wait_s=_PREDECESSOR_S) if is_writer else None
    if is_writer and lock is None:
        print(f"a training process of {run.path} is still alive", file=sys.stderr)  # noqa: T201 - log.txt is its output
        return 1
    worker = Worker(run)
    code = worker.main()
    gc.freeze()  # skip the collection at exit
    return distributed.tear_down(worker.rank, code)


if __name__ == "__main__":
    status = main()
    if status and distributed.this_rank().world_size == 1:
        # a retry can start sooner: the interpreter's exit would wait until the base model's files are hashed
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
