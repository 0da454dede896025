"""TRL's `SFTTrainer` for a plan: arguments, row order, token counts, sealed checkpoints."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import Sampler
from trl import SFTConfig, SFTTrainer

from finetune import distributed
from finetune.compat.transformers import without_packing_detection
from finetune.compat.trl import narrow_tiles
from finetune.data.pictures.processing import PictureProcessor
from finetune.data.pictures.source import source_from_dict
from finetune.data.shards import PICTURES, picture_sizes
from finetune.data.tokenizer import ProcessorLoader, read_tokenizer
from finetune.data.tokens import Encoder
from finetune.data.tool_calls import Answer
from finetune.errors import DiskFull, is_disk_full, is_out_of_memory
from finetune.events import Checkpoint, Evaluation, EventWriter, Phase, Sample
from finetune.files import read_json
from finetune.layers.checkpointing import decoder_layers
from finetune.layers.compiled import compile_problem
from finetune.methods import Collator, method_of
from finetune.methods.row_order import LongestEarly, row_lengths
from finetune.model.generate import greedy_answers
from finetune.model.padding import without_mask
from finetune.model.techniques import apply_techniques, step_context, training_arguments
from finetune.planner.plan import Plan
from finetune.run.best import EvaluatedStep, evaluations, recorded_row_losses, write_row_losses
from finetune.run.directory import RunDirectory
from finetune.run.memory import MemorySampler
from finetune.run.seal import rotate, seal
from finetune.settings import Settings
from finetune.settings.compatibility import lean_layers_conflict, padding_multiple
from finetune.settings.methods import NOT_TRAINED

_PARTIAL = ".partial"
_PROMPT_TOKENS, _ANSWER_TOKENS = 512, 64  # limits in tokens: the KV cache of an 8B model stays below 300 MB


class OneCardConfig(SFTConfig):
    """SFTConfig for training on one GPU."""

    @property
    def n_gpu(self) -> int:
        # transformers wraps the model in DataParallel when a process sees several GPUs
        return min(1, super().n_gpu)


def sft_config(plan: Plan, run: RunDirectory) -> SFTConfig:
    """Return the SFTConfig for a plan, with TRL's silent truncation, dropping of rows and NaN filter switched off."""
    settings, on_cpu, warmup_steps = plan.settings, plan.card.is_cpu, plan.settings.warmup_steps
    arguments: dict[str, Any] = dict(
        output_dir=str(run.checkpoints),
        dataset_kwargs={"skip_prepare_dataset": True},  # examples come tokenised, with labels, none over max_length
        max_length=None,
        packing=False,  # packed already by finetune/data/splits.py, which checks that nothing is lost
        padding_free=settings.packing,
        pad_to_multiple_of=padding_multiple(settings, settings.per_device_train_batch_size),
        per_device_train_batch_size=settings.per_device_train_batch_size,
        per_device_eval_batch_size=settings.per_device_eval_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        num_train_epochs=settings.num_train_epochs,
        max_steps=settings.max_steps or -1,
        learning_rate=settings.learning_rate,
        lr_scheduler_type=settings.lr_scheduler_type,
        warmup_steps=round(settings.warmup_ratio * (plan.total_steps or 0)) if warmup_steps is None else warmup_steps,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.max_grad_norm,
        seed=settings.seed,
        data_seed=settings.seed,
        bf16=settings.dtype == "bfloat16",
        fp16=settings.dtype == "float16",
        use_cpu=on_cpu,
        ddp_find_unused_parameters=False,
        save_on_each_node=settings.launch.num_machines > 1,  # each machine has its run directory
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,  # the filter would replace NaN with the last finite loss
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
        accelerator_config={"non_blocking": not on_cpu},  # copy a batch while the step before it still runs
        remove_unused_columns=not settings.training_method.has_own_format and settings.vision is not True,
        **training_arguments(settings),
    )
    return OneCardConfig(**arguments)


@contextlib.contextmanager
def _without_module_walks(model: Any) -> Iterator[None]:
    # the trainer sets the mode and lists the parameters in each step, and both walk all modules: 2,665 in an 8B with adapters
    parameters, set_mode = list(model.parameters()), model.train
    model.train = lambda mode=True: model if model.training == mode else set_mode(mode)
    model.parameters = lambda recurse=True: iter(parameters)
    try:
        yield
    finally:
        del model.train, model.parameters


class SampleAnswers:
    """Answers short held-out prompts at evaluations."""

    def __init__(self, plan: Plan, run: RunDirectory, tokenizer: Any, processor: PictureProcessor | None = None) -> None:
        self._tokenizer, self._rows = tokenizer, []
        self._processor, self._continues = processor, run.base_adapter.is_dir()
        settings, path = plan.settings, run.data / "eval_examples.json"
        if settings.launch.strategy != "ddp" or not path.is_file():  # a single rank can't generate with sharded weights
            return
        short_rows = [row for row in read_json(path) if len(row["prompt_ids"]) <= _PROMPT_TOKENS]
        self._rows = short_rows[: settings.sample_answers]

    def emit(self, model: Any, step: int, events: EventWriter, *, is_first: bool) -> None:
        """Emit a `sample` event per prompt, the first time also one without the adapters, as step 0."""
        if is_first and self._rows and not self._continues:
            with model.disable_adapter():
                self._emit_answers(model, 0, events)
        self._emit_answers(model, step, events)

    def _emit_answers(self, model: Any, step: int, events: EventWriter) -> None:
        if not self._rows:
            return
        encoder = Encoder(self._tokenizer, with_template=self._tokenizer.chat_template is not None)
        questions = [row["prompt_ids"] for row in self._rows]
        try:
            picture_inputs = None
            if self._processor:
                sources = [[source_from_dict(value) for value in row.get("pictures", ())] for row in self._rows]
                picture_inputs = partial(self._processor.batch, rows=sources)
            answers = greedy_answers(
                model, self._tokenizer, questions, stops=encoder.stops, max_new_tokens=_ANSWER_TOKENS,
                with_special_tokens=encoder.template is not None, more_inputs=picture_inputs,
            )  # fmt: skip
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._rows = []  # out of memory ends sampling, not the run
            events.warn("no more sample answers: not enough memory to generate them")
            return
        for row, (text, is_cut) in zip(self._rows, answers, strict=True):
            answer = encoder.template.format.read(text, None, is_cut=is_cut) if encoder.template else Answer(text)
            events.emit(Sample(
                step=step, prompt=row["prompt"], expected=row["answer"], answer=answer.text or answer.thought,
                pictures=tuple(picture["path"] for picture in row.get("pictures", ())),
            ))  # fmt: skip


class RunTrainer(SFTTrainer):
    """SFTTrainer with token counts, early longest rows and sealed checkpoints."""

    def __init__(
        self, *, plan: Plan, run: RunDirectory, events: EventWriter, memory: MemorySampler,
        seal_facts: Future[dict[str, Any]], needs_mask: bool, **arguments: Any,
    ) -> None:  # fmt: skip
        self.plan, self.run, self.events, self.memory, self.seal_facts = plan, run, events, memory, seal_facts
        # `needs_mask`: the model receives the batch's attention mask
        self.needs_mask, self.phase, self.method = needs_mask, "train", method_of(plan.settings)
        if not self.method.is_sft:  # a mean over the micro-batch: the trainer divides it by the accumulation steps
            self.loss_is_scaled_for_ga = False  # type: ignore[assignment]
        self._counts = defaultdict[str, Any](int)  # since `take_counts`
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._sealing: Future[None] | None = None
        self.best: EvaluatedStep | None = None  # only a step with a checkpoint, or due for one before the next step
        super().__init__(**arguments)
        self.data_collator = self.method.collator(self.data_collator) or self.data_collator
        self._processor = picture_processor_of(plan.settings, run.data) if plan.settings.vision else None
        if self._processor:
            self.data_collator = PictureCollator(self.data_collator, self._processor)
        self.sample_answers = SampleAnswers(plan, run, self.processing_class, self._processor)

    def train(self, *arguments: Any, **named: Any) -> Any:
        # not with several ranks: FSDP replaces the parameters
        cached = _without_module_walks(self.model) if distributed.this_rank().world_size == 1 else contextlib.nullcontext()
        with cached, narrow_tiles(self.model.config, on_cpu=self.plan.card.is_cpu):  # type: ignore[union-attr]
            return super().train(*arguments, **named)

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        self._counts["supervised"] += (inputs["labels"][..., 1:] != NOT_TRAINED).sum()
        self._counts["real"] += ids.numel() if mask is None else mask.sum()
        self._counts["padded"] += ids.numel()
        # each use of a bitsandbytes weight would call Python code of its class
        with torch._C.DisableTorchFunctionSubclass(), step_context(self.plan.settings, ids.device):
            return super().training_step(model, inputs, num_items_in_batch)

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        return 0  # transformers would walk all modules in each step, for a figure that nobody reads

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        """Return the method's loss, or TRL's loss when method sft or pretrain evaluates."""
        # TRL would read five numbers from the device after each forward pass
        if not self.needs_mask:
            inputs = without_mask(inputs)
        with contextlib.nullcontext() if self.plan.settings.packing else without_packing_detection():
            if self.method.is_sft and (return_outputs or not self.model.training):  # type: ignore[union-attr]
                return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
            # TRL's metrics read five numbers from the GPU after each forward pass, before the backward pass can be launched:
            # `take_counts` reads them once per step
            loss = self._method_loss(model, inputs, num_items_in_batch if self.method.is_sft else None)
        return (loss, {}) if return_outputs else loss

    def _method_loss(self, model: Any, inputs: dict[str, Any], items: Any) -> Any:
        computed = self.method.loss(model, inputs, items=items, routed=self.aux_loss_enabled or None)
        loss = computed.loss
        if self.args.average_tokens_across_devices and items is not None:
            loss = loss * self.accelerator.num_processes  # DDP averages the gradients over the ranks
        if self.aux_loss_enabled:
            steps = 1 if items is None else self.current_gradient_accumulation_steps
            loss = loss + self.router_aux_loss_coef * computed.auxiliary / steps  # type: ignore[operator]
        for name, count in computed.counts.items():
            self._counts[name] += count
        return loss

    def take_counts(self) -> dict[str, Any]:
        """Return and reset the counts, summed over all ranks. Synchronises the device once."""
        counts, self._counts = self._counts, defaultdict(int)
        if not counts:
            return dict.fromkeys(("supervised", "real", "padded", "correct"))
        on_device = {name: count for name, count in counts.items() if isinstance(count, torch.Tensor)}
        on_host = torch.stack([count.double() for count in on_device.values()]).tolist()  # one copy for all
        counts |= zip(on_device, on_host, strict=True)
        sums = distributed.all_reduce([float(count) for count in counts.values()], "SUM")
        fractions = {name for name, count in on_device.items() if count.is_floating_point()}
        return {name: total if name in fractions else int(total) for name, total in zip(counts, sums, strict=True)}

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int]:
        rows: Any = train_dataset if train_dataset is not None else self.train_dataset
        batch, steps = self.plan.settings.effective_batch_size, self.plan.total_steps or 0
        pixel_values: Sequence[int] = ()
        if self._processor is not None and PICTURES in rows.column_names:
            sizes = picture_sizes(rows.with_format("arrow")[:][PICTURES])
            pixel_values = self._processor.values_by_row(sizes, len(rows)).tolist()
        return LongestEarly(row_lengths(rows), self.args.seed, batch, steps, pixel_values)

    def evaluate(self, *arguments: Any, **named: Any) -> dict[str, float]:
        # arms of a sweep are compared row by row
        is_arm = self.run.arm.exists() and distributed.this_rank().world_size == 1
        recording = recorded_row_losses(self.model) if is_arm else contextlib.nullcontext()
        with self.measured_phase("evaluate"), recording as rows:
            metrics = super().evaluate(*arguments, **named)
        if rows is not None:
            write_row_losses(self.run, self.state.global_step, metrics.get("eval_loss"), rows)
        self.events.emit(Evaluation(
            step=self.state.global_step, eval_loss=metrics.get("eval_loss"), eval_s=self.phase_s,
            eval_token_accuracy=metrics.get("eval_mean_token_accuracy"), metrics=self.method.metrics(self.take_counts()),
        ))  # fmt: skip
        if distributed.this_rank().is_local_rank_0:
            model, is_first = self.accelerator.unwrap_model(self.model), len(evaluations(self.state.log_history)) == 1
            self.sample_answers.emit(model, self.state.global_step, self.events, is_first=is_first)
        return metrics

    def create_model_card(self, *arguments: Any, **named: Any) -> None:
        """Write no model card: TRL would add one to each checkpoint."""

    def _get_output_dir(self, trial: Any) -> str:
        return str(self.run.checkpoints / _PARTIAL)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save to a temporary folder; hash and rename it to `checkpoint-N` while training continues. Raises DiskFull."""
        step, partial = self.state.global_step, self.run.checkpoints / _PARTIAL
        # also raises the error of the previous checkpoint's sealing
        with self.measured_phase("save"), self._checkpoint_errors(step):
            self.finish_sealing()
            if self.is_local_process_zero():
                shutil.rmtree(partial, ignore_errors=True)
            distributed.barrier()
            super()._save_checkpoint(model, trial)
            distributed.barrier()
        if self.is_local_process_zero():
            self._sealing = self._sealer.submit(self._seal, partial / f"checkpoint-{step}", step, self.phase_s, self.best)

    def finish_sealing(self) -> None:
        """Wait until the newest checkpoint is sealed. Raises the sealing error, once."""
        sealing, self._sealing = self._sealing, None
        if sealing is not None:
            sealing.result()

    def _seal(self, folder: Path, step: int, save_s: float, best: EvaluatedStep | None) -> None:
        with self._checkpoint_errors(step):
            facts, began = self.seal_facts.result(), time.perf_counter()
            target = seal(folder, self.run.checkpoints / f"checkpoint-{step}", step, facts)
            seal_s = time.perf_counter() - began
            size = sum(path.stat().st_size for path in target.rglob("*") if path.is_file())
            path = target.relative_to(self.run.path).as_posix()
            self.events.emit(Checkpoint(step=step, path=path, bytes=size, save_s=save_s, seal_s=seal_s))
        rotate(self.run.checkpoints, self.plan.settings.save_total_limit, best.step if best else None)

    @contextlib.contextmanager
    def _checkpoint_errors(self, step: int) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            shutil.rmtree(self.run.checkpoints / _PARTIAL, ignore_errors=True)
            if isinstance(error, DiskFull) or not is_disk_full(error):
                raise
            problem = f"checkpoint of step {step} could not be written: {error}"
            raise DiskFull(problem, f"Free some space, then: finetune resume {self.run.path}") from error

    def compile_or_undo(self, problem: str) -> Plan:
        """Compile the layers; return the plan, without compiling if that fails. `problem`: a known reason to fail."""
        plan, model, rows = self.plan, cast("Any", self.model), cast("Any", self.train_dataset)
        if not problem:
            lengths = row_lengths(rows)
            longest = max(range(len(lengths)), key=lengths.__getitem__)
            inputs = self._prepare_inputs(self.data_collator([rows[longest]] * plan.settings.per_device_train_batch_size))
            model.train()
            hooks = step_context(plan.settings, inputs["input_ids"].device)
            # as in `training_step`
            with self.measured_phase("compile"), self.accelerator.autocast(), torch._C.DisableTorchFunctionSubclass(), hooks:
                problem = compile_problem(decoder_layers(model), lambda: self.compute_loss(model, inputs))
            self.take_counts()
            gc.collect()  # compiled code from a cache leaves reference cycles that hold the inputs
        if not problem:
            return plan
        settings = plan.settings.model_copy(update={"torch_compile": False})
        settings = settings.model_copy(update={"lean_layers": not lean_layers_conflict(settings)})
        apply_techniques(model, settings)
        self.events.warn(f"layers are not compiled: {problem}; the run uses lean layers, which are slower")
        return dataclasses.replace(plan, settings=settings)

    @contextlib.contextmanager
    def measured_phase(self, name: str) -> Iterator[None]:
        """Emit a `phase` event with the memory peak of the block; set `phase_s`."""
        began = time.perf_counter()
        self.memory.reset_peak()
        self.phase = name  # stays set after an error, to name the phase that failed
        yield
        self.phase_s = time.perf_counter() - began
        self.phase = "train"
        memory = vars(self.memory.sample())
        self.events.emit(Phase(phase=name, step=self.state.global_step, phase_s=self.phase_s, **memory))
        self.memory.reset_peak()


@dataclasses.dataclass(frozen=True)
class PictureCollator:
    """Makes the same batch as TRL's vision collator."""

    text_collator: Collator
    processor: PictureProcessor

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        text_rows = [{name: value for name, value in row.items() if name != PICTURES} for row in rows]
        batch = dict(self.text_collator(text_rows))
        sources = [[source_from_dict(value) for value in row[PICTURES]] for row in rows]
        # raises DataError for a missing or changed image
        return batch | self.processor.batch(batch["input_ids"], sources)


def picture_processor_of(settings: Settings, data: Path) -> PictureProcessor:
    """Return the processor in a run's data folder."""
    folder = data / "tokenizer"
    return ProcessorLoader(settings, folder)(read_tokenizer(folder, settings))
