"""Memory per card under DDP, FSDP and DeepSpeed ZeRO-3, for a plan that does not fit on one card."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from finetune.errors import FinetuneError
from finetune.memory.forecast import Forecast
from finetune.planner.plan import CardNeeds, ManyCards, verdict_of
from finetune.settings import AUTO, Recipe, Settings, resolved
from finetune.settings.base_formats import NF4, base_format_of, switches
from finetune.settings.compatibility import NOT_REENTRANT
from finetune.settings.optimizers import FUSED, OPTIMIZERS

#: The strategies compared: the name shown, and its `launch` settings.
STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ddp", {"strategy": "ddp"}),
    ("fsdp", {"strategy": "fsdp"}),
    ("fsdp, offload to cpu", {"strategy": "fsdp", "offload": "cpu"}),
    ("deepspeed zero-3", {"strategy": "deepspeed", "zero_stage": 3}),
)


def needs_of_each_card(
    recipe: Recipe, settings: Settings, budget_bytes: int, forecasts: Callable[[Settings], Forecast]
) -> ManyCards | None:
    """Bytes per card in each of STRATEGIES with the plan's `settings`, on the recipe's number of cards or the fewest above one.

    None when the effective batch can't be divided.
    """
    cards = _cards(settings)
    if cards is None:
        return None
    rows = (_row(name, launch, cards, recipe, settings, budget_bytes, forecasts) for name, launch in STRATEGIES)
    return ManyCards(cards, budget_bytes, tuple(rows))


def _cards(settings: Settings) -> int | None:
    """The recipe's world size, else the smallest above one that divides the effective batch."""
    if settings.launch.num_processes > 1:
        return settings.launch.num_processes
    batch = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
    return next((cards for cards in range(2, batch + 1) if batch % cards == 0), None)


def _row(
    name: str, launch: dict[str, Any], cards: int, recipe: Recipe, settings: Settings, budget_bytes: int,
    forecasts: Callable[[Settings], Forecast],
) -> CardNeeds:  # fmt: skip
    changes = _changes(launch, cards, settings)
    typed = {f"launch.{key}": value for key, value in {"num_processes": cards, **launch}.items()}
    typed |= {key: value for key, value in changes.items() if key != "launch" and getattr(recipe, key) not in (AUTO, value)}
    row = CardNeeds(name, " ".join(f"{key}={str(value).lower()}" for key, value in typed.items()))
    try:
        forecast = forecasts(resolved(settings, **changes))
    except FinetuneError as error:  # e.g. a checkpoint stored in a format that can't be sharded
        return replace(row, cost=str(error))
    processes = cards // settings.launch.num_machines if launch["strategy"] == "ddp" else 1  # the others count all
    return replace(
        row, load_bytes=forecast.peaks["load"], train_bytes=forecast.peaks["train"],
        peak_high_bytes=forecast.peak_high_bytes, host_bytes=processes * forecast.host_bytes,
        verdict=verdict_of(forecast, budget_bytes),
    )  # fmt: skip


def _changes(launch: dict[str, Any], cards: int, settings: Settings) -> dict[str, Any]:
    """The plan's settings changed for another launch: same effective batch; settings that can't be sharded are replaced."""
    n_processes = settings.launch.num_processes
    rows = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * n_processes // cards
    micro = math.gcd(settings.per_device_train_batch_size, rows)
    launch_settings = settings.launch.model_dump(exclude_unset=True, exclude={"nvme_path"})
    changes: dict[str, Any] = {
        "launch": {**launch_settings, "offload": "none", "num_processes": cards, **launch},
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": rows // micro,
    }  # fmt: skip
    changes |= {"layer_offloading": False, "offloaded_layers": 0}
    if launch["strategy"] == "ddp":
        return changes
    if not OPTIMIZERS[settings.optim].shards:
        changes["optim"] = FUSED
    changes["offload_embeddings"] = False
    if not base_format_of(settings).shards:
        changes |= switches(NF4)
    if launch["strategy"] == "deepspeed" and settings.activation_checkpointing in NOT_REENTRANT:
        changes["activation_checkpointing"] = True
    if launch.get("zero_stage") == 3:
        changes |= {"lean_layers": False, "mlp_tile_tokens": 0}
    return changes
