"""Compiles a run's layers before the first step, or lets the run go on with lean layers."""

from __future__ import annotations

import dataclasses
import gc
from typing import TYPE_CHECKING, Any

from finetune.layers.checkpointing import decoder_layers
from finetune.layers.compiled import compile_problem
from finetune.methods.row_order import row_lengths
from finetune.model.techniques import apply_techniques, step_context
from finetune.settings.compatibility import lean_layers_conflict

if TYPE_CHECKING:
    from finetune.planner.plan import Plan
    from finetune.run.training import RunTrainer


def compile_or_undo(trainer: RunTrainer, problem: str) -> Plan:
    """Compile the layers of a trainer whose plan says so, with its longest rows; return the plan, or the one without compiling.

    `problem`: why nothing can be compiled on this machine, if that is known. The run goes on in any case.
    """
    plan = trainer.plan
    model: Any = trainer.model
    rows: Any = trainer.train_dataset
    settings = plan.settings
    if not problem:
        lengths = row_lengths(rows)
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        inputs = trainer.on_device([rows[longest]] * settings.per_device_train_batch_size)
        model.train()
        hooks = step_context(settings, inputs["input_ids"].device)
        with trainer.measured_phase("compile"), trainer.accelerator.autocast(), hooks:
            problem = compile_problem(decoder_layers(model), lambda: trainer.compute_loss(model, inputs))
        trainer.take_counts()
        gc.collect()  # compiled code that comes from a cache leaves cycles with the inputs in them
    if not problem:
        return plan
    lean = settings.model_copy(update={"torch_compile": False})
    lean = lean.model_copy(update={"lean_layers": not lean_layers_conflict(lean)})
    apply_techniques(model, lean)
    trainer.events.warn(f"layers are not compiled: {problem}; lean layers take their place, which are slower")
    return dataclasses.replace(plan, settings=lean)
