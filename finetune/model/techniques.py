"""The memory techniques of a plan, put to work: by training on a device and by the forecast on tensors without data."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from finetune.compat.transformers import checkpointing_name
from finetune.errors import RecipeError
from finetune.model.checkpointing import decoder_layers, keep_all, recompute
from finetune.model.cpu_adamw import CpuAdamW
from finetune.model.host_memory import is_forecast
from finetune.model.saved_activations import SavedActivations
from finetune.recipe import Recipe

#: Our own optimizer, by its name in a recipe; the others are transformers' names.
CPU_OFFLOAD = "adamw_cpu_offload"


def technique_problems(settings: Recipe) -> list[str]:
    """Settings whose techniques can't work together, one line each; empty when all is well."""
    problems, strategy, zero3 = [], settings.launch.strategy, _is_zero3(settings)
    if settings.optim == CPU_OFFLOAD and strategy != "ddp":
        problems.append(f"optim {CPU_OFFLOAD} keeps whole parameters; launch.strategy {strategy} splits them")
    if zero3 and settings.activation_checkpointing in ("selective", "offload"):
        problems.append(
            f"activation_checkpointing {settings.activation_checkpointing} does not work with DeepSpeed ZeRO-3; set it to true"
        )
    if settings.torch_compile and settings.int8_activations:
        problems.append("int8_activations and torch_compile are both true; what a compiled layer keeps can't be rounded")
    if _offloads_inputs_of_compiled_layers(settings) and _every_n_layers(settings) > 1:
        problems.append("activation_checkpointing offload with torch_compile needs activation_checkpointing_every_n_layers 1")
    return problems


def apply_techniques(model: torch.nn.Module, settings: Recipe) -> None:
    """Checkpointing and per-layer compilation, in place, before training. May be called again with other settings.

    `model` is a transformers model or a PeftModel of one. A forecast's model is not compiled: what the compiler would save is
    left as a reserve. Raises RecipeError for techniques that exclude each other.
    """
    problems = technique_problems(settings)
    if problems:
        raise RecipeError(problems, "Leave one of each pair out.")
    how = settings.activation_checkpointing
    if how is False:
        keep_all(model)
    else:
        recompute(
            model,
            every_n_layers=_every_n_layers(settings),
            selective=how == "selective",
            offload=how == "offload" and not settings.torch_compile,
            reentrant=_is_zero3(settings),
        )
    if settings.torch_compile and not any(is_forecast(parameter) for parameter in model.parameters()):
        for layer in decoder_layers(model):
            layer.compile()


def step_context(settings: Recipe, device: torch.device | str) -> contextlib.AbstractContextManager[Any]:
    """What forward and backward of one micro-batch run in: hooks on the activations that autograd keeps, or nothing.

    `device` is where the batch is; for CUDA the host copies are pinned.
    """
    offload = settings.activation_offloading or _offloads_inputs_of_compiled_layers(settings)
    if not (offload or settings.int8_activations):
        return contextlib.nullcontext()
    return SavedActivations(offload=offload, int8=settings.int8_activations, pinned=torch.device(device).type == "cuda")


def training_arguments(settings: Recipe) -> dict[str, Any]:
    """Fields of SFTConfig (TrainingArguments). Checkpointing is off there: `apply_techniques` has turned it on in the model,
    and transformers and TRL would add theirs on top."""
    return {
        checkpointing_name(): False,
        "activation_offloading": False,
        "optim": "adamw_torch" if settings.optim == CPU_OFFLOAD else settings.optim,
    }


def optimizer_class(settings: Recipe) -> tuple[type[torch.optim.Optimizer], dict[str, Any]] | None:
    """Trainer's `optimizer_cls_and_kwargs` for the optimizer that transformers doesn't know; None for the others."""
    if settings.optim != CPU_OFFLOAD:
        return None
    return CpuAdamW, {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}


def _is_zero3(settings: Recipe) -> bool:
    return settings.launch.strategy == "deepspeed" and settings.launch.zero_stage == 3


def _every_n_layers(settings: Recipe) -> int:
    every = settings.activation_checkpointing_every_n_layers
    return every if isinstance(every, int) else 1


def _offloads_inputs_of_compiled_layers(settings: Recipe) -> bool:
    """Hooks inside a layer would break its graph. Around the step they do as well: such layers keep only their inputs."""
    return settings.torch_compile and settings.activation_checkpointing == "offload"
