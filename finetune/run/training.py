"""TRL's SFTTrainer for a plan: arguments, order of the rows, token counts, sealed checkpoints."""

from __future__ import annotations

import contextlib
import heapq
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pyarrow import compute
from torch.utils.data import Sampler
from trl import SFTConfig, SFTTrainer

from finetune.compat.transformers import without_packing_detection
from finetune.data.tokens import NOT_TRAINED
from finetune.distributed import ranks
from finetune.errors import DiskFull
from finetune.events import Checkpoint, Evaluation, Phase, RunWarning
from finetune.model.padding import without_mask
from finetune.model.techniques import step_context, training_arguments
from finetune.recipe.compatibility import padding_multiple
from finetune.run.best import best_of, best_sealed, evaluations, unusable_best_message
from finetune.run.failures import is_disk_full
from finetune.run.samples import Samples
from finetune.run.seal import rotate, seal

if TYPE_CHECKING:
    from finetune.events import EventWriter
    from finetune.planner.plan import Plan
    from finetune.recipe import Settings
    from finetune.run.best import EvaluatedStep
    from finetune.run.directory import RunDirectory
    from finetune.run.memory import MemorySampler

_PARTIAL = ".partial"


def _warmup_steps(settings: Settings, total_steps: int) -> int:
    return round(settings.warmup_ratio * total_steps) if settings.warmup_steps is None else settings.warmup_steps


class OneCardConfig(SFTConfig):
    """SFTConfig of a process that trains on one card, also where it sees more: transformers would use DataParallel."""

    @property
    def n_gpu(self) -> int:
        """0 on a CPU, else 1."""
        return min(1, super().n_gpu)


def sft_config(plan: Plan, run: RunDirectory) -> SFTConfig:
    """SFTConfig for a plan, with TRL's silent defaults switched off (truncation, dropping, NaN filter, fp32)."""
    settings = plan.settings
    on_cpu = plan.card.is_cpu
    return OneCardConfig(
        output_dir=str(run.checkpoints),
        dataset_kwargs={"skip_prepare_dataset": True},  # rows come tokenised, with labels, none over max_length
        max_length=None,
        packing=False,  # packed by finetune.data.pack already, which checks that nothing is lost
        padding_free=settings.packing,
        pad_to_multiple_of=padding_multiple(settings, settings.per_device_train_batch_size),
        per_device_train_batch_size=settings.per_device_train_batch_size,
        per_device_eval_batch_size=settings.per_device_eval_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        num_train_epochs=settings.num_train_epochs,
        max_steps=settings.max_steps or -1,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.lr_scheduler_type,
        warmup_steps=_warmup_steps(settings, plan.total_steps or 0),
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        data_seed=settings.seed,
        bf16=settings.dtype == "bfloat16",
        fp16=settings.dtype == "float16",
        use_cpu=on_cpu,
        ddp_find_unused_parameters=False,
        save_on_each_node=settings.launch.num_machines > 1,  # each machine has a run directory of its own
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,  # it would replace a NaN by the last finite loss
        eval_strategy="steps" if settings.eval_steps and plan.data and plan.data.eval_rows else "no",
        eval_steps=settings.eval_steps or None,
        prediction_loss_only=True,
        save_strategy="steps" if settings.save_steps else "no",
        save_steps=settings.save_steps or 500,
        save_total_limit=None,  # see finetune.run.seal.rotate
        report_to=[],  # trackers follow the events, see finetune.run.trackers
        disable_tqdm=True,
        dataloader_num_workers=settings.dataloader_num_workers,
        dataloader_pin_memory=not on_cpu,
        remove_unused_columns=True,
        **training_arguments(settings),
    )


def row_lengths(rows: Any) -> list[int]:
    """Tokens of each row, from the offsets: a million rows as lists of integers would take minutes and gigabytes."""
    return compute.list_value_length(rows.with_format("arrow")[:]["input_ids"]).to_pylist()


def trained_counts(rows: Any) -> list[int]:
    """Tokens of each row that count in the loss."""
    labels = rows.with_format("arrow")[:]["labels"].combine_chunks()
    ends = np.cumsum(compute.list_value_length(labels).to_numpy(zero_copy_only=False))
    counts = np.concatenate(([0], np.cumsum(labels.flatten().to_numpy(zero_copy_only=False) != NOT_TRAINED)))
    return np.diff(counts[ends], prepend=0).tolist()


class LongestEarly(Sampler[int]):
    """Random order by seed and epoch, except that the two longest rows train in the first two optimizer steps, so that out of
    memory happens there and not at step 2,321, and that a step's rows are sorted by length, so that its micro-batches have
    little padding. Which rows are in a step is not changed by the sorting, and so neither is the step's gradient.

    The second longest starts step 1: weights and activations. The longest ends step 2, where the optimizer's states and, with
    gradient accumulation, the gradients of earlier micro-batches are in memory, too: the peak that the forecast is of. They
    are swapped with the rows that were there, so each row still trains once an epoch. `batch` is the effective batch size:
    the order is independent of all that an out-of-memory retry changes. `steps`: the run's optimizer steps.
    """

    def __init__(self, lengths: list[int], seed: int, batch: int, steps: int) -> None:
        self._lengths, self._seed, self._batch, self._steps, self._epoch = lengths, seed, batch, steps, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which selects the order."""
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = torch.randperm(len(self._lengths), generator=generator).tolist()
        indices = self._longest_indices()
        longest = heapq.nlargest(len(indices), range(len(order)), key=self._lengths.__getitem__)
        for row, index in zip(longest, indices, strict=True):
            other = order.index(row)
            order[index], order[other] = row, order[index]
        starts = range(0, len(order), self._batch)
        return iter([row for start in starts for row in self._sorted(order[start : start + self._batch], start)])

    def _sorted(self, rows: list[int], start: int) -> list[int]:
        """A step's rows by length: those of the first step from the longest down, others up."""
        return sorted(rows, key=self._lengths.__getitem__, reverse=start == self._epoch == 0)

    def _longest_indices(self) -> tuple[int, ...]:
        """Indices of the longest rows in this epoch, the longest first."""
        rows = len(self._lengths)
        if self._epoch == 0:
            return (0,)[:rows] if rows <= self._batch or self._steps == 1 else (min(2 * self._batch, rows) - 1, 0)
        return (rows - 1,) if self._epoch == 1 and 0 < rows <= self._batch else ()  # one step an epoch


class RunTrainer(SFTTrainer):
    """SFTTrainer that counts tokens, runs the longest rows early and seals its checkpoints.

    `masked`: the model is given the batch's attention mask.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        run: RunDirectory,
        events: EventWriter,
        memory: MemorySampler,
        seal_facts: dict[str, Any],
        masked: bool,
        **arguments: Any,
    ) -> None:
        self.plan, self.run, self.events, self.memory, self.seal_facts = plan, run, events, memory, seal_facts
        self.masked, self.phase = masked, "train"
        self._counted: dict[str, Any] = {}
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._sealing: Future[None] | None = None
        self.best: EvaluatedStep | None = None  # that has a checkpoint, or gets one before the next step
        super().__init__(**arguments)
        self.samples = Samples(plan, run, self.processing_class)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """Run one micro-batch with the plan's saved-activation hooks, and count its tokens."""
        self._count(inputs)
        with step_context(self.plan.settings, inputs["input_ids"].device):
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """TRL's loss. In training its metrics are left to `take_token_counts`: TRL would ask the device for five numbers after
        each forward pass, which waits for the device before the backward pass can be launched."""
        if not self.masked:
            inputs = without_mask(inputs)
        with contextlib.nullcontext() if self.plan.settings.packing else without_packing_detection():
            if return_outputs or not self.model.training:  # type: ignore[union-attr]
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            return self._training_loss(model, inputs, num_items_in_batch)

    def _training_loss(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any) -> Any:
        routed = {"output_router_logits": True} if self.aux_loss_enabled else {}
        outputs = model(**inputs, **routed, use_cache=False, fused_lm_head=True)
        tokens = outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch
        loss = (-outputs.log_probs).sum() / torch.as_tensor(tokens).clamp(min=1)
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * self.accelerator.num_processes  # of which DDP averages
        if self.aux_loss_enabled:
            steps = 1 if num_items_in_batch is None else self.current_gradient_accumulation_steps
            loss = loss + self.router_aux_loss_coef * outputs.aux_loss / steps
        self._add("correct", outputs.is_top1.sum())
        return loss

    def take_token_counts(self) -> dict[str, int | None]:
        """Tokens of all ranks since the last call: supervised, real, with padding, and predicted correctly. Synchronises the
        device once."""
        counted, self._counted = self._counted, {}
        if not counted:
            return dict.fromkeys(("supervised", "real", "padded", "correct"))
        values = torch.stack([torch.as_tensor(count, device=self.args.device) for count in counted.values()]).tolist()
        return dict(zip(counted, ranks.all_reduce_sum(values), strict=True))

    def _count(self, inputs: dict[str, Any]) -> None:
        ids, labels, mask = inputs["input_ids"], inputs["labels"], inputs.get("attention_mask")
        self._add("supervised", (labels[..., 1:] != -100).sum())
        self._add("real", ids.numel() if mask is None else mask.sum())
        self._add("padded", ids.numel())

    def _add(self, name: str, count: Any) -> None:
        self._counted[name] = self._counted.get(name, 0) + count

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        rows: Any = train_dataset if train_dataset is not None else self.train_dataset
        lengths = row_lengths(rows)
        return LongestEarly(lengths, self.args.seed, self.plan.settings.effective_batch_size, self.plan.total_steps or 0)

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        """Evaluate the loss, as a phase with its own memory peak."""
        with self._phase("evaluate") as took:
            metrics = super().evaluate(*arguments, **named)
        took_s = took()
        self.events.emit(Evaluation(
            step=self.state.global_step, eval_loss=metrics.get("eval_loss"), eval_s=took_s,
            eval_token_accuracy=metrics.get("eval_mean_token_accuracy"),
        ))  # fmt: skip
        if ranks.this_rank().is_local_rank_0:
            self.samples.emit(self.accelerator.unwrap_model(self.model), self.state.global_step, self.events)
        return metrics

    def recall_best(self) -> None:
        """Find the best step of a resumed run in its history; warn when its checkpoint is unusable."""
        evaluated = evaluations(self.state.log_history)
        self.best, lowest = best_sealed(evaluated, self.run), best_of(evaluated)
        if lowest is not None and lowest != self.best:
            self.events.emit(RunWarning(message=unusable_best_message(lowest.step, "missing or damaged")))

    def is_best_so_far(self) -> bool:
        """After an evaluation: whether its loss is the lowest of the steps that have a checkpoint, and remembered as such."""
        newest = evaluations(self.state.log_history)[-1:]
        if best_of(newest) is None or (self.best is not None and newest[0].loss >= self.best.loss):
            return False
        self.best = newest[0]
        return True

    def create_model_card(self, *arguments: Any, **named: Any) -> None:
        """Write no model card: TRL would write one into each checkpoint."""

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.run.checkpoints / _PARTIAL)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write to a temporary folder, then hash, sync and rename it to checkpoint-N while training continues.

        Raises DiskFull, also for the checkpoint before this one, and leaves no partial one.
        """
        step, partial = self.state.global_step, self.run.checkpoints / _PARTIAL
        with self._phase("save") as took, self._removing_partial(step):
            self.finish_sealing()
            if self.is_local_process_zero():
                shutil.rmtree(partial, ignore_errors=True)
            ranks.barrier()
            super()._save_checkpoint(model, trial)
            ranks.barrier()
        if self.is_local_process_zero():
            self._sealing = self._sealer.submit(self._seal, partial / f"checkpoint-{step}", step, took(), self.best)

    def finish_sealing(self) -> None:
        """Wait until the newest checkpoint is sealed. Raises the error of its sealing, once."""
        sealing, self._sealing = self._sealing, None
        if sealing is not None:
            sealing.result()

    def _seal(self, folder: Path, step: int, save_s: float, best: EvaluatedStep | None) -> None:
        began = time.perf_counter()
        with self._removing_partial(step):
            target = seal(folder, self.run.checkpoints / f"checkpoint-{step}", step, self.seal_facts)
            seal_s = time.perf_counter() - began
            size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
            path = target.relative_to(self.run.path).as_posix()
            self.events.emit(Checkpoint(step=step, path=path, bytes=size, save_s=save_s, seal_s=seal_s))
        rotate(self.run.checkpoints, self.plan.settings.save_total_limit, best.step if best else None)

    @contextlib.contextmanager
    def _removing_partial(self, step: int) -> Iterator[None]:
        """On an error remove the partial checkpoint; a full disk is raised as DiskFull."""
        try:
            yield
        except Exception as error:
            shutil.rmtree(self.run.checkpoints / _PARTIAL, ignore_errors=True)
            if isinstance(error, DiskFull) or not is_disk_full(error):
                raise
            raise DiskFull(
                f"checkpoint of step {step} could not be written: {error}",
                f"Free some space, then: finetune resume {self.run.path}",
            ) from error

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[Any]:
        """Emit a phase event with its memory peak at the end; yields a function that returns its seconds."""
        ended: list[float] = []
        began = time.perf_counter()
        self.memory.reset_peak()
        self.phase = name  # stays set after an error, to name the phase that failed
        yield lambda: (ended or [time.perf_counter()])[0] - began
        ended.append(time.perf_counter())
        self.phase = "train"
        memory = vars(self.memory.sample())
        self.events.emit(Phase(phase=name, step=self.state.global_step, phase_s=ended[0] - began, **memory))
        self.memory.reset_peak()
