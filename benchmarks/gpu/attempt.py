"""One attempt at a run with memory by phase, without the supervisor and its retries.

    python -m benchmarks.gpu.attempt RUN RESULT [--peft-cast | --plain-trl]

The process is the worker itself, or, with --plain-trl, TRL alone as its documentation has it, with the rows, quantisation, LoRA
rank, batch, optimizer and seed of the run's plan, and TRL's own loss, checkpointing and adapters' dtype. RESULT has what the
run's events lack.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import sys
import time
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
    """Highest allocated and reserved bytes within forward (with loss), backward and optimizer, and what is in use on the whole
    card at their ends, which is the most as long as torch gives nothing back. On a CPU host RSS.

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


class TimedPhases(Phases):
    """The same with seconds of each optimizer step, the device synchronised, and tokens: TRL writes no events."""

    def __init__(self, memory: MemorySampler) -> None:
        super().__init__(memory)
        self.step_s: list[float] = []
        self.tokens: list[Any] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The clock starts."""
        self._began = settled_clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The clock stops."""
        self.step_s.append(settled_clock() - self._began)

    def watch(self, trainer: Any) -> None:
        """Also count the real tokens of each micro-batch, outside the device's work."""
        super().watch(trainer)
        training_step = trainer.training_step

        def counted(model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
            mask = inputs.get("attention_mask")
            self.tokens.append(inputs["input_ids"].numel() if mask is None else mask.sum())
            return training_step(model, inputs, *arguments, **named)

        trainer.training_step = counted


def settled_clock() -> float:
    """Seconds of the clock, when the device has nothing left to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


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


def trl_trainer(run: RunDirectory, plan: Any) -> Any:
    """TRL's trainer for the plan's settings."""
    from datasets import load_from_disk
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
    from trl import SFTConfig, SFTTrainer

    from finetune.model.configuration import resolve_model_path

    settings = plan.settings
    nf4 = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
    )
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model_path(settings), dtype=torch.bfloat16, device_map={"": "cpu" if plan.card.is_cpu else 0},
        **({"quantization_config": nf4} if settings.load_in_4bit else {}),
    )  # fmt: skip
    return SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(run.path / "trl"), per_device_train_batch_size=settings.per_device_train_batch_size,
            gradient_accumulation_steps=settings.gradient_accumulation_steps, max_steps=settings.max_steps or -1,
            learning_rate=settings.learning_rate, max_length=settings.max_length, optim=settings.optim, bf16=True,
            gradient_checkpointing=settings.activation_checkpointing is not False, use_cpu=plan.card.is_cpu,
            seed=settings.seed, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        ),
        train_dataset=load_from_disk(str(run.data / "train")),
        processing_class=AutoTokenizer.from_pretrained(str(run.data / "tokenizer")),
        peft_config=LoraConfig(
            r=settings.lora_r, lora_alpha=settings.lora_alpha, target_modules=settings.target_modules, task_type="CAUSAL_LM"
        ),
    )  # fmt: skip


def train_plain(run: RunDirectory) -> dict[str, Any]:
    """The figures of TRL alone."""
    from finetune.planner.plan import read_plan

    plan = read_plan(run.plan)
    phases = TimedPhases(MemorySampler(on_cuda=not plan.card.is_cpu))
    began = settled_clock()
    trainer = trl_trainer(run, plan)
    load_s = settled_clock() - began
    phases.end("load")
    phases.watch(trainer)
    trainer.train()
    count, tokens = plan.settings.gradient_accumulation_steps, list(map(int, phases.tokens))
    return {
        "phases": phases.peaks, "load_s": load_s, "step_s": phases.step_s,
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "step_tokens": [sum(tokens[start : start + count]) for start in range(0, len(tokens), count)],
    }  # fmt: skip


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
    parser.add_argument("--plain-trl", action="store_true")
    options = parser.parse_args()
    run, code = RunDirectory(options.run), 0
    if options.plain_trl:
        figures = train_plain(run)
    else:
        worker = MeasuredWorker(run, options.peft_cast)
        code, figures = worker.main(), {"phases": worker.phases.peaks}
    options.result.write_text(json.dumps({**figures, "allocator": allocator()}))
    gc.freeze()
    return code


if __name__ == "__main__":
    sys.exit(main())
