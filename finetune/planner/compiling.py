"""Decision whether to compile decoder layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from finetune.planner.choices import AS_SET, Choices
from finetune.planner.speed import Job, time_step
from finetune.planner.strategy import Strategy
from finetune.settings import AUTO, resolved
from finetune.settings.base_formats import INT8
from finetune.settings.compatibility import compiling_conflict
from finetune.settings.optimizers import EIGHT_BIT, OPTIMIZERS

#: Seconds to compile a layer: 2 to 33 on a busy machine, once 112 (benchmarks/reference/compiled_matrix.csv).
COMPILE_S = 25.0
#: Model types whose compiled layers were run on a stand-in: one graph, and the forecast's bytes. phi3's forecast is 2 to 4 %
#: too high for rows of uneven length (benchmarks/reference/compiled_matrix.csv).
COMPILED_TYPES = (
    "exaone4", "gemma", "gemma3_text", "granite", "llama", "ministral3", "mistral", "olmo2", "olmo3", "phi3", "qwen2", "qwen3",
    "seed_oss", "smollm3",
)  # fmt: skip
#: Lowest compute capability for which torch's compiler has Triton kernels (torch/_inductor/scheduler.py).
LEAST_CAPABILITY = (7, 0)


def why_lean(
    job: Job, choices: Choices, config: dict[str, Any], steps_of: Callable[[int], int | None], strategy: Strategy
) -> str:
    """Return why a strategy's layers are not compiled; empty if compiling pays off."""
    recipe, card = choices.recipe, job.card
    if recipe.torch_compile != AUTO:
        return AS_SET
    if card.is_cpu:
        return "a processor computes most of a step in the same kernels"
    if strategy.base is INT8:
        return compiling_conflict(resolved(recipe, load_in_8bit=True))
    if strategy.offload_target:
        return "weights of layers that are moved have not been tried"
    if strategy.checkpointing == "offload" and strategy.every_n > 1:
        return "inputs of every layer or of none are offloaded"
    if recipe.lora_dropout and strategy.checkpointing:
        return "dropout in recomputed layers needs more than its forecast"
    if card.capability is not None and card.capability < LEAST_CAPABILITY:
        return f"Triton has no kernels for compute capability {card.capability[0]}.{card.capability[1]}"
    if recipe.lean_layers is True or recipe.mlp_tile_tokens not in (AUTO, 0):
        return "the recipe asks for lean layers"
    if recipe.launch.num_processes > 1:
        return "several processes have not been tried"
    if (kind := (config.get("text_config") or config).get("model_type")) not in COMPILED_TYPES:
        return f"layers of type {kind} have not been tried"
    if why := compiling_conflict(recipe):
        return why
    if OPTIMIZERS[strategy.optim].price > OPTIMIZERS[EIGHT_BIT].price and not choices.is_set("optim"):
        return f"{strategy.optim} is taken where memory is too short for it"
    # the number of steps depends on the micro-batch
    pays, reason = compiling_pays(job, strategy, steps_of(strategy.micro))
    return "" if pays else reason


def compiling_pays(job: Job, strategy: Strategy, steps: int | None) -> tuple[bool, str]:
    """Tell whether compiled layers save more time than compiling takes."""
    lean, compiled = (time_step(dataclasses.replace(job, compiled=on), strategy).step_s for on in (False, True))
    if compiled >= lean:
        return False, "by the model of a step it saves no time"
    needed = math.ceil(COMPILE_S / (lean - compiled))
    saved = f"by the model of a step it saves {1 - compiled / lean:.0%} of time; compiling takes about {COMPILE_S:.0f} s, which"
    if steps is not None and steps < needed:
        return False, f"{saved} pays off after {needed:,} steps, and the run has {steps:,}"
    return True, f"{saved} pays off after {needed:,} steps"
