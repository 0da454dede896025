"""What a training method costs beside SFT of the same rows: in memory by a dry run, in time by the speed model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from finetune.memory.forecast import Forecast
from finetune.planner.speed import Job, knows_rates, time_step
from finetune.planner.strategy import Strategy
from finetune.settings import Settings, resolved
from finetune.settings.methods import METHODS


def price_beside_sft(
    job: Job, strategy: Strategy, settings: Settings, peak_bytes: int, forecast: Callable[[Settings], Forecast]
) -> str:
    """A sentence for a method that is not SFT, whose peak with these settings is `peak_bytes`; else empty. `forecast`: of
    other settings with the same rows."""
    if not METHODS[settings.method].has_own_format:
        return ""
    sft = METHODS["sft"]
    others = dict.fromkeys(METHODS[settings.method].settings)
    memory = peak_bytes / forecast(resolved(settings, method="sft", precompute_ref_log_probs=False, **others)).peak_bytes
    price = f"{memory:.1f} x the memory"
    if knows_rates(job.card):
        time = time_step(job, strategy).step_s / time_step(dataclasses.replace(job, method=sft), strategy).step_s
        price += f" and {time:.1f} x the time"
    return f"method {settings.method} takes {price} of method sft on as many rows of this length, with the same settings"
