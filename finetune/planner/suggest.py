"""Advice when nothing fits: changes that save memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from finetune.memory.forecast import Forecast
from finetune.planner.plan import LEAST_LENGTH, DataStatistics, Suggestion, as_overrides
from finetune.settings import AUTO, Recipe, Settings, resolved
from finetune.settings.base_formats import NF4, QUANTISED, base_format_of, is_open
from finetune.settings.optimizers import EIGHT_BIT, OPTIMIZERS

ForecastOf = Callable[[Settings], Forecast]


def suggest(
    recipe: Recipe, settings: Settings, forecast: Forecast, forecast_of: ForecastOf, data: DataStatistics | None
) -> tuple[Suggestion, ...]:
    """Return single changes that save memory, the largest saving first."""
    suggestions = []
    for changes, cost in _changes(recipe, settings, data):
        every_layer = {"offloaded_layers": forecast.layers} if "layer_offloading" in changes else {}
        try:
            changed_settings = resolved(settings, **changes, **every_layer)
        except ValueError:  # excluded by another setting of the recipe, such as an optimizer that can't be sharded
            continue
        high_bytes = forecast_of(changed_settings).peak_high_bytes
        saved_bytes = forecast.peak_high_bytes - high_bytes
        if saved_bytes > 0:
            suggestions.append(Suggestion(as_overrides(changes), saved_bytes, high_bytes, cost))
    return tuple(sorted(suggestions, key=lambda suggestion: -suggestion.saves_bytes))


def _changes(recipe: Recipe, settings: Settings, data: DataStatistics | None) -> Iterator[tuple[dict[str, Any], str]]:
    base = base_format_of(settings)
    if base not in QUANTISED and not is_open(recipe, NF4):
        yield {NF4.setting: True}, "NF4 weights: dequantisation takes a few percent of time"
    elif base in QUANTISED and base.bits > NF4.bits:
        yield {base.setting: False, NF4.setting: True}, f"NF4 weights instead of {base.label}"
    if recipe.per_device_train_batch_size != AUTO and settings.per_device_train_batch_size > 1:
        steps = settings.gradient_accumulation_steps * settings.per_device_train_batch_size
        single_rows = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": steps}
        yield single_rows, "same effective batch, smaller micro-batches: slower on short rows"
    is_set = recipe.activation_checkpointing != AUTO or recipe.activation_checkpointing_every_n_layers != AUTO
    if is_set and (settings.activation_checkpointing is False or settings.activation_checkpointing_every_n_layers > 1):
        every_layer = {"activation_checkpointing": True, "activation_checkpointing_every_n_layers": 1}
        yield every_layer, "forward pass runs twice: up to 45 % more time"
    if recipe.optim != AUTO and OPTIMIZERS[settings.optim].state_bytes > OPTIMIZERS[EIGHT_BIT].state_bytes:
        yield {"optim": EIGHT_BIT}, "8-bit optimizer states"
    drop = {"excess_length": "drop"} if settings.excess_length == "raise" else {}
    least = LEAST_LENGTH + (sum(data.picture_tokens) if data else 0)
    for length in (settings.max_length // 2, settings.max_length // 4):
        if length >= least:
            yield {"max_length": length, **drop}, _length_cost(length, data)
    if recipe.layer_offloading is False and not settings.vision:
        recomputing = {} if settings.activation_checkpointing else {"activation_checkpointing": True}
        cost = "layer weights in host memory, copied to the GPU during computation"
        yield {"layer_offloading": "cpu", **recomputing}, cost
    if settings.lora_r > 8:
        yield {"lora_r": max(8, settings.lora_r // 4)}, "a smaller adapter learns less"


def _length_cost(length: int, data: DataStatistics | None) -> str:
    if data is None or not data.lengths:
        return "longer rows are dropped"
    longer = [row_tokens for row_tokens in data.lengths if row_tokens > length]
    share = sum(longer) / data.total_tokens if data.total_tokens else 0.0
    return f"{len(longer):,} of {data.rows:,} rows ({share:.1%} of the tokens) are longer"
