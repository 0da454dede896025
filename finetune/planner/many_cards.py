"""Memory per card under DDP, FSDP and DeepSpeed ZeRO-3."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from finetune.errors import FinetuneError
from finetune.memory.forecast import Forecast
from finetune.planner.plan import CardNeeds, ManyCards, as_overrides, verdict_of
from finetune.settings import AUTO, Recipe, Settings, resolved
from finetune.settings.base_formats import NF4, base_format_of, switches
from finetune.settings.compatibility import NOT_REENTRANT
from finetune.settings.optimizers import FUSED, OPTIMIZERS

#: Compared strategies: name, and `launch` settings.
STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ddp", {"strategy": "ddp"}),
    ("fsdp", {"strategy": "fsdp"}),
    ("fsdp, offload to cpu", {"strategy": "fsdp", "offload": "cpu"}),
    ("deepspeed zero-3", {"strategy": "deepspeed", "zero_stage": 3}),
)


def needs_of_each_card(
    recipe: Recipe, settings: Settings, budget_bytes: int, forecasts: Callable[[Settings], Forecast]
) -> ManyCards | None:
    """Return the bytes per card in each of STRATEGIES; None if the effective batch can't be divided."""
    cards = settings.launch.num_processes
    if cards == 1:
        batch = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
        # the fewest above one
        cards = next((count for count in range(2, batch + 1) if batch % count == 0), 0)
    if not cards:
        return None
    rows = []
    for name, launch in STRATEGIES:
        changes = _changes(launch, cards, settings)
        typed = {f"launch.{key}": value for key, value in {"num_processes": cards, **launch}.items()}
        # show only changes of settings that the recipe sets otherwise
        typed |= {key: value for key, value in changes.items() if key != "launch" and getattr(recipe, key) not in (AUTO, value)}
        row = CardNeeds(name, as_overrides(typed))
        try:
            forecast = forecasts(resolved(settings, **changes))
        except FinetuneError as error:  # e.g. a checkpoint stored in a format that can't be sharded
            rows.append(replace(row, cost=str(error)))
            continue
        # other strategies' host_bytes count all ranks
        processes = cards // settings.launch.num_machines if launch["strategy"] == "ddp" else 1
        rows.append(replace(
            row, load_bytes=forecast.peaks["load"], train_bytes=forecast.peaks["train"],
            peak_high_bytes=forecast.peak_high_bytes, host_bytes=processes * forecast.host_bytes,
            verdict=verdict_of(forecast, budget_bytes),
        ))  # fmt: skip
    return ManyCards(cards, budget_bytes, tuple(rows))


def _changes(launch: dict[str, Any], cards: int, settings: Settings) -> dict[str, Any]:
    n_processes = settings.launch.num_processes
    rows = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * n_processes // cards
    micro = math.gcd(settings.per_device_train_batch_size, rows)
    launch_settings = settings.launch.model_dump(exclude_unset=True, exclude={"nvme_path"})
    changes: dict[str, Any] = {
        "launch": {**launch_settings, "offload": "none", "num_processes": cards, **launch},
        "per_device_train_batch_size": micro, "gradient_accumulation_steps": rows // micro,
        "layer_offloading": False, "offloaded_layers": 0,
    }  # fmt: skip
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
