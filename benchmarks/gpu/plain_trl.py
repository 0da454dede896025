"""The rows and settings of a run with TRL alone, as its documentation has it: `python -m benchmarks.gpu.plain_trl RUN RESULT`.

TRL's own loss, checkpointing and adapters' dtype; the quantisation, LoRA rank, batch, optimizer and seed of the run's plan.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import load_from_disk
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from benchmarks.gpu.phases import Phases, StepTimes, allocator, synchronise
from finetune.model.configuration import resolve_model_path
from finetune.planner.plan import Plan, read_plan
from finetune.run.directory import RunDirectory


def build(run: RunDirectory, plan: Plan) -> SFTTrainer:
    """TRL's trainer for the plan's settings."""
    settings = plan.settings
    recomputed = settings.activation_checkpointing is not False
    quantised: dict[str, Any] = {}
    if settings.load_in_4bit:
        quantised["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16
        )
    model = AutoModelForCausalLM.from_pretrained(
        resolve_model_path(settings), dtype=torch.bfloat16, device_map={"": "cpu" if plan.card.is_cpu else 0}, **quantised
    )
    return SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=str(run.path / "trl"), per_device_train_batch_size=settings.per_device_train_batch_size,
            gradient_accumulation_steps=settings.gradient_accumulation_steps, max_steps=settings.max_steps or -1,
            learning_rate=settings.learning_rate, max_length=settings.max_length, gradient_checkpointing=recomputed,
            optim=settings.optim, bf16=True, use_cpu=plan.card.is_cpu, seed=settings.seed, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True,
        ),
        train_dataset=load_from_disk(str(run.data / "train")),
        processing_class=AutoTokenizer.from_pretrained(str(run.data / "tokenizer")),
        peft_config=LoraConfig(
            r=settings.lora_r, lora_alpha=settings.lora_alpha, target_modules=settings.target_modules, task_type="CAUSAL_LM"
        ),
    )  # fmt: skip


def main() -> None:
    """Train and write the figures."""
    run, result = RunDirectory(Path(sys.argv[1])), Path(sys.argv[2])
    plan = read_plan(run.plan)
    began = time.perf_counter()
    trainer = build(run, plan)
    synchronise()
    load_s = time.perf_counter() - began
    phases, times, tokens = Phases(on_cuda=not plan.card.is_cpu), StepTimes(), Tokens()
    phases.end("load")
    phases.watch(trainer)
    trainer.add_callback(times)
    tokens.watch(trainer)
    trainer.train()
    figures = {
        "phases": phases.peaks, "allocator": allocator(), "load_s": load_s, "step_s": times.step_s, "losses": times.losses,
        "step_tokens": tokens.by_step(plan.settings.gradient_accumulation_steps),
    }  # fmt: skip
    result.write_text(json.dumps(figures))


class Tokens:
    """Real tokens of each micro-batch, counted outside the device's work."""

    def __init__(self) -> None:
        self._counts: list[Any] = []

    def watch(self, trainer: SFTTrainer) -> None:
        """Count the tokens of each training step's inputs."""
        training_step = trainer.training_step

        def counted(model: Any, inputs: dict[str, Any], *arguments: Any, **named: Any) -> Any:
            mask = inputs.get("attention_mask")
            self._counts.append(inputs["input_ids"].numel() if mask is None else mask.sum())
            return training_step(model, inputs, *arguments, **named)

        trainer.training_step = counted  # type: ignore[method-assign]

    def by_step(self, micro_batches: int) -> list[int]:
        """Tokens of each optimizer step."""
        counts = [int(count) for count in self._counts]
        return [sum(counts[start : start + micro_batches]) for start in range(0, len(counts), micro_batches)]


if __name__ == "__main__":
    main()
