"""Settings that memory doesn't decide: dtype, adapters, length, the effective batch, cadence and the run's directory."""

from __future__ import annotations

import hashlib
import json
import math
import re
from typing import Any

from finetune.card.card import Card
from finetune.errors import RecipeError
from finetune.plan.advice import advise_alpha, advise_learning_rate, advise_rank
from finetune.plan.attention import PACKED_LENGTH, choose_packing
from finetune.plan.choices import Choices
from finetune.plan.lengths import LENGTH_STEP
from finetune.plan.plan import DataStatistics
from finetune.plan.shape import ModelShape
from finetune.recipe import AUTO, Recipe, write_recipe

#: Rows per optimizer step when the recipe doesn't say.
USUAL_BATCH = 16
#: Length in tokens when neither the recipe nor the data says.
USUAL_LENGTH = 2048
#: Evaluations and checkpoints in a run, about.
CADENCE = 10


def choose_basics(
    choices: Choices, card: Card, config: dict[str, Any], shape: ModelShape, data: DataStatistics | None, no_room: bool = False
) -> None:
    """Resolve everything that does not depend on memory. Raises RecipeError for a batch that the processes can't share.

    `no_room`: packed sequences were found not to fit.
    """
    _choose_numbers(choices, card)
    choose_packing(choices, card, config, data, no_room)
    _choose_adapter(choices, shape, data)
    _choose_length(choices, shape, data)
    choose_batch(choices, data)
    choices.choose("gpu", card.name, card.reason)
    choices.reasons["gpu"] = card.reason
    choices.choose("output_dir", _directory(choices.recipe), "model and digest of the recipe; a taken name gets a number")


def _choose_numbers(choices: Choices, card: Card) -> None:
    if card.is_cpu:
        choices.choose("dtype", "float32", "16-bit arithmetic is slow or missing on most processors")
    elif card.supports_bf16:
        choices.choose("dtype", "bfloat16", "half the bytes of float32 at its range; this card computes it natively")
    else:
        generation = "this card" if card.capability is None else f"compute capability {card.capability[0]}.{card.capability[1]}"
        choices.choose("dtype", "float16", f"{generation} has no bfloat16")


def _choose_adapter(choices: Choices, shape: ModelShape, data: DataStatistics | None) -> None:
    choices.choose("target_modules", "all-linear", "adapters on all layers, the MLP's too, learn best (LoRA Without Regret)")
    choices.choose("lora_r", *advise_rank(shape, data))
    choices.choose("lora_alpha", *advise_alpha(choices.recipe, choices.value("lora_r")))
    choices.choose("learning_rate", *advise_learning_rate(shape))


def _choose_length(choices: Choices, shape: ModelShape, data: DataStatistics | None) -> None:
    limit = shape.max_positions
    if data is not None and data.longest:
        rounded = -(-data.longest // LENGTH_STEP) * LENGTH_STEP
        length = max(data.longest, min(rounded, limit or rounded), 8)
        if choices.value("packing") is True:
            length = max(length, min(PACKED_LENGTH, limit or PACKED_LENGTH))
        choices.choose("max_length", length, f"the longest row has {data.longest:,} tokens, so nothing is cut")
    else:
        length = min(USUAL_LENGTH, limit or USUAL_LENGTH)
        why = "the model's own limit" if length < USUAL_LENGTH else "the usual length"
        choices.choose("max_length", length, f"{why}; the rows have not been read, so every row is taken as this long")
    if limit and choices.value("max_length") > limit:
        choices.reasons["max_length"] += f"; above the {limit:,} positions the model was made for"


def choose_batch(choices: Choices, data: DataStatistics | None) -> None:
    """The effective batch: the recipe's, or 16, or what the recipe's micro-batch and accumulation make. Raises RecipeError."""
    recipe, world = choices.recipe, choices.recipe.launch.num_processes
    parts = [part for part in (recipe.per_device_train_batch_size, recipe.gradient_accumulation_steps) if part != AUTO]
    unit = world * math.prod(parts)
    if choices.is_set("effective_batch_size"):
        batch = recipe.effective_batch_size
        if batch % unit:
            raise RecipeError(
                f"effective_batch_size {batch} can't be shared by {world} processes",
                f"Use {batch // unit * unit or unit} or {(batch // unit + 1) * unit}.",
            )
    batch, why = _usual_batch(choices, unit, len(parts), data)
    choices.choose("effective_batch_size", batch, why)


def _usual_batch(choices: Choices, unit: int, parts: int, data: DataStatistics | None) -> tuple[int, str]:
    if parts == 2:
        return unit, "per_device_train_batch_size x gradient_accumulation_steps x processes, as the recipe sets them"
    if data is not None and data.rows < USUAL_BATCH:
        batch = max(unit, 2 ** int(math.log2(max(1, data.rows))))
        return math.ceil(batch / unit) * unit, f"{data.rows} rows are fewer than the usual 16"
    if choices.value("packing") is True and data is not None:
        rows = max(1.0, choices.value("max_length") * data.rows / data.total_tokens)
        batch = math.ceil(max(1, round(USUAL_BATCH / rows)) / unit) * unit
        return batch, f"sequences of about {rows:.0f} rows: about {round(batch * rows)} rows a step, the usual being 16"
    why = "16, as in QLoRA; LoRA loses from batches that are much larger (LoRA Without Regret)"
    return math.ceil(USUAL_BATCH / unit) * unit, why


def choose_cadence(choices: Choices, data: DataStatistics | None) -> int | None:
    """Evaluation and checkpoint steps from the number of optimizer steps, which is returned; None when the rows are unknown."""
    steps = total_steps(choices.settings(), data)
    every = max(1, math.ceil(steps / CADENCE)) if steps else 100
    about = f"about {CADENCE} times in {steps:,} steps" if steps else "the number of rows is not known yet"
    if data is not None and data.eval_rows == 0:
        choices.choose("eval_steps", 0, "no rows are held out")
    else:
        choices.choose("eval_steps", every, about)
    choices.choose("save_steps", every, about)
    return steps


def total_steps(settings: Recipe, data: DataStatistics | None) -> int | None:
    """Optimizer steps of the run: the last, smaller batch of an epoch counts as a step; None when the rows are unknown."""
    if settings.max_steps is not None:
        return settings.max_steps
    if data is None:
        return None
    sequences = math.ceil(data.total_tokens / settings.max_length) if settings.packing is True else data.rows
    here = math.ceil(sequences / settings.launch.num_processes)
    micro_batches = math.ceil(here / settings.per_device_train_batch_size)
    return math.ceil(settings.num_train_epochs * math.ceil(micro_batches / settings.gradient_accumulation_steps))


def _directory(recipe: Recipe) -> str:
    """`runs/<model>-<8 hex of the recipe>`: the same recipe gives the same name, so the same plan."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe.model_name_or_path.rstrip("/").rpartition("/")[2]).strip("-.") or "model"
    digest = hashlib.sha256(json.dumps(write_recipe(recipe)).encode()).hexdigest()[:8]
    return f"runs/{model}-{digest}"
