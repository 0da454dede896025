"""Rank, scale and learning rate, each with its source."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from finetune.settings.methods import METHODS
from finetune.settings.optimizers import FUSED, OPTIMIZERS
from finetune.units import format_count

if TYPE_CHECKING:
    from finetune.planner.plan import DataStatistics
    from finetune.planner.shape import ModelShape
    from finetune.settings import Recipe

#: "LoRA Without Regret" (Schulman and Thinking Machines Lab, 2025): rate = 5e-5 x 10 x (2000 / hidden)^power, by family.
BASE_RATE, LORA_FACTOR, HIDDEN_UNIT = 5e-5, 10.0, 2000
FAMILY_POWER = {"llama": 0.781, "qwen2": 0.0775, "qwen3": 0.0775}
#: QLoRA (Dettmers et al., 2023), table of hyperparameters: 2e-4 for 7B and 13B, 1e-4 for 33B and 65B.
QLORA_RATE, QLORA_LARGE_RATE, QLORA_LARGE = 2e-4, 1e-4, 20e9
RANKS = (16, 32, 64, 128, 256)
#: Capacity of an adapter parameter and information of a trained token, in bits ("LoRA Without Regret").
BITS_PER_PARAMETER, BITS_PER_TOKEN = 2.0, 1.0


def advise_rank(shape: ModelShape, data: DataStatistics | None) -> tuple[int, str]:
    """Return the smallest rank with adapter capacity for the trained tokens."""
    if data is None or shape.adapter_per_rank == 0:
        return RANKS[0], "quality hardly depends on rank when every layer has an adapter (QLoRA)"
    needed = data.trained_tokens * BITS_PER_TOKEN / BITS_PER_PARAMETER
    rank = next((rank for rank in RANKS if rank * shape.adapter_per_rank >= needed), RANKS[-1])
    parameters = rank * shape.adapter_per_rank
    enough = "enough" if parameters >= needed else "too few"
    return rank, (
        f"{format_count(parameters)} adapter parameters at 2 bits each are {enough} for {format_count(data.trained_tokens)} "
        "trained tokens at 1 bit each (LoRA Without Regret)"
    )


def advise_alpha(recipe: Recipe, rank: int) -> tuple[float, str]:
    """Return alpha 32, or with rsLoRA the same scale at rank 16."""
    if recipe.use_rslora:
        return 8.0, "scale 8 / sqrt(r): one learning rate for every rank (rsLoRA); at rank 16 the scale of plain alpha 32"
    return 32.0, f"scale 32 / {rank}: with a fixed alpha the best learning rate hardly depends on rank (LoRA Without Regret)"


def advise_learning_rate(shape: ModelShape, method: str = "sft", optim: str = FUSED) -> tuple[float, str]:
    """Return the rate for this method and optimizer, to two significant digits."""
    power, of_method, of_optimizer, reasons = FAMILY_POWER.get(shape.family), METHODS[method], OPTIMIZERS[optim], []
    if power is None:  # the paper did not fit this family
        rate = QLORA_RATE if shape.parameters < QLORA_LARGE else QLORA_LARGE_RATE
        why = f"{rate:.0e} for {shape.billions} (QLoRA's table: 2e-4 up to 13B, 1e-4 from 33B)".replace("e-0", "e-")
    else:
        rate = _two_digits(BASE_RATE * LORA_FACTOR * (HIDDEN_UNIT / shape.hidden) ** power)
        formula = f"5e-5 x 10 x (2000 / {shape.hidden})^{power} for {shape.family} (LoRA Without Regret)"
        why = f"10 x full fine-tuning's rate: {formula}"
    if of_optimizer.rate_source:
        reasons.append(f"{of_optimizer.rate_factor:g} x AdamW's rate ({of_optimizer.rate_source})")
    if of_method.rate_source:
        reasons.append(f"{of_method.rate_factor:g} x SFT's rate ({of_method.rate_source})")
        why = f"SFT's: {why}"
    rate *= of_method.rate_factor * of_optimizer.rate_factor
    return _two_digits(rate), "; ".join([*reasons, why])


def _two_digits(value: float) -> float:
    return round(value, 1 - math.floor(math.log10(value)))
