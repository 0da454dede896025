"""Host memory and disk: what the run needs besides the card, and whether this machine has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from finetune.card.card import Card
from finetune.files import free_disk_bytes
from finetune.forecast.forecast import Forecast
from finetune.plan.shape import ModelShape
from finetune.recipe import Recipe


def check_resources(settings: Recipe, shape: ModelShape, forecast: Forecast, card: Card) -> list[dict[str, Any]]:
    """One row each for host memory and disk: needed, free, and whether that is enough.

    For a card of the catalogue the machine is not this one: what is free is unknown, and so is `enough`.
    """
    here = card.source != "catalogue"
    host_free = psutil.virtual_memory().available if here else None
    disk_free = free_disk_bytes(Path(settings.output_dir)) if here else None
    return [
        _row("host memory", forecast.host_bytes, None if card.is_cpu else host_free),
        _row("disk", max(forecast.disk_bytes, disk_bytes(settings, shape)), disk_free),
    ]


def disk_bytes(settings: Recipe, shape: ModelShape) -> int:
    """Checkpoints kept and one being written (fp32 adapter and optimizer state), the adapter, and the merged 16-bit model."""
    adapter = 4 * settings.lora_r * shape.adapter_per_rank
    checkpoint = adapter * (1 + 2)
    return (settings.save_total_limit + 1) * checkpoint + adapter + 2 * shape.parameters


def _row(what: str, needed: int, free: int | None) -> dict[str, Any]:
    return {"what": what, "needs_bytes": needed, "free_bytes": free, "enough": None if free is None else needed <= free}
