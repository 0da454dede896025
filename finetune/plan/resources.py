"""Host memory and disk that a run needs, and whether this machine has them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from finetune.files import free_disk_bytes
from finetune.plan.plan import ResourceCheck

if TYPE_CHECKING:
    from finetune.card.card import Card
    from finetune.forecast.forecast import Forecast
    from finetune.recipe import Settings


def check_resources(settings: Settings, forecast: Forecast, card: Card) -> tuple[ResourceCheck, ...]:
    """Host memory and disk: needed, free, and whether that is enough.

    A catalogue card is in another machine: there `free_bytes` and `enough` are None.
    """
    here = card.source != "catalogue"
    host_free = psutil.virtual_memory().available if here and not card.is_cpu else None
    return (
        _check("host memory", forecast.host_bytes, host_free),
        _check("disk", forecast.disk_bytes, free_disk_bytes(Path(settings.output_dir)) if here else None),
    )


def _check(what: str, needed: int, free: int | None) -> ResourceCheck:
    return ResourceCheck(what, needed, free, None if free is None else needed <= free)
