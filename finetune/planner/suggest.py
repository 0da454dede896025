"""Advice when nothing fits: changes that save memory, smaller models, and memory per GPU under DDP, FSDP and ZeRO-3."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from finetune.errors import FinetuneError
from finetune.memory.forecast import Forecast
from finetune.model.catalogue import Entry, entries
from finetune.planner.plan import LEAST_LENGTH, CardNeeds, DataStatistics, ManyCards, Suggestion, as_overrides, verdict_of
from finetune.planner.shape import shape_of
from finetune.settings import AUTO, Recipe, Settings, resolved
from finetune.settings.base_formats import NF4, QUANTISED, base_format_of, is_open, switches
from finetune.settings.compatibility import NOT_REENTRANT
from finetune.settings.optimizers import EIGHT_BIT, FUSED, OPTIMIZERS
from finetune.units import format_count

ForecastOf = Callable[[Settings], Forecast]
#: Most catalogue models to forecast, from the largest down.
MOST_MODELS = 4
#: Prefixes of the models that are suggested.
_FAMILIES = (
    "HuggingFaceTB/", "Qwen/Qwen2.5-", "Qwen/Qwen3-", "google/gemma-", "meta-llama/Llama-3", "microsoft/", "mistralai/Mistral-",
)  # fmt: skip

#: Compared strategies: name, and `launch` settings.
STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("ddp", {"strategy": "ddp"}),
    ("fsdp", {"strategy": "fsdp"}),
    ("fsdp, offload to cpu", {"strategy": "fsdp", "offload": "cpu"}),
    ("deepspeed zero-3", {"strategy": "deepspeed", "zero_stage": 3}),
)


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
    if settings.dtype == "bfloat16" and settings.adapter_dtype == "float32":
        yield {"adapter_dtype": "bfloat16"}, "adapters are rounded to bf16 after each update, as in TRL with 4-bit weights"
    if settings.lora_dropout > 0:
        yield {"lora_dropout": 0.0}, "no dropout"
    if settings.use_dora:
        yield {"use_dora": False}, "plain LoRA"


def _length_cost(length: int, data: DataStatistics | None) -> str:
    if data is None or not data.lengths:
        return "longer rows are dropped"
    longer = [row_tokens for row_tokens in data.lengths if row_tokens > length]
    share = sum(longer) / data.total_tokens if data.total_tokens else 0.0
    return f"{len(longer):,} of {data.rows:,} rows ({share:.1%} of the tokens) are longer"


def models_by_size(most_parameters: float) -> Iterator[tuple[str, Entry]]:
    """Yield the catalogue's models of at most this size, the largest first."""
    for name, entry in sorted(entries().items(), key=lambda item: (-item[1].parameters, item[0])):
        if entry.first and entry.parameters <= most_parameters:
            yield name, entry


def largest_model(
    recipe: Recipe, settings: Settings, budget_bytes: int, forecast_of: Callable[[Settings, dict[str, Any]], Forecast]
) -> str | None:
    """Return the largest catalogue model that fits in NF4, with its parameters."""
    forecasts = 0
    for name, entry in models_by_size(budget_bytes / 0.5):  # NF4 weights alone take half a byte per parameter
        is_kind = "vision_config" in entry.config if settings.vision else "text_config" not in entry.config
        if not (is_kind and name.startswith(_FAMILIES)) or name == recipe.model_name_or_path:
            continue
        other = resolved(settings, model_name_or_path=name, model_revision=None, trust_remote_code=False, **switches(NF4))
        try:
            shape = shape_of(entry.config, other)
            if shape.weight_bytes(NF4) > 0.95 * budget_bytes:  # a forecast costs up to a second: skip hopeless models
                continue
            forecasts += 1
            forecast = forecast_of(other, entry.config)
        except FinetuneError:  # e.g. layers named in target_modules that this model doesn't have
            continue
        if forecast.peak_high_bytes <= budget_bytes:
            return f"{name} ({format_count(shape.parameters)} parameters)"
        if forecasts >= MOST_MODELS:
            break
    return None


def needs_of_each_card(recipe: Recipe, settings: Settings, budget_bytes: int, forecast_of: ForecastOf) -> ManyCards | None:
    """Return the bytes per GPU in each of STRATEGIES; None if the effective batch can't be divided."""
    cards = settings.launch.num_processes
    if cards == 1:
        batch = settings.per_device_train_batch_size * settings.gradient_accumulation_steps
        # the fewest GPUs above one that divide the batch
        cards = next((count for count in range(2, batch + 1) if batch % count == 0), 0)
    if not cards:
        return None
    rows = []
    for name, launch in STRATEGIES:
        changes = _launch_changes(launch, cards, settings)
        overrides = {f"launch.{key}": value for key, value in {"num_processes": cards, **launch}.items()}
        # show only changes of settings that the recipe sets otherwise
        others = {key: value for key, value in changes.items() if key != "launch"}
        overrides |= {key: value for key, value in others.items() if getattr(recipe, key) not in (AUTO, value)}
        row = CardNeeds(name, as_overrides(overrides))
        try:
            forecast = forecast_of(resolved(settings, **changes))
        except (ValueError, FinetuneError) as error:  # e.g. a method, or the checkpoint's format, that can't be sharded
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


def _launch_changes(launch: dict[str, Any], cards: int, settings: Settings) -> dict[str, Any]:
    n_processes = settings.launch.num_processes
    rows = settings.per_device_train_batch_size * settings.gradient_accumulation_steps * n_processes // cards
    micro = math.gcd(settings.per_device_train_batch_size, rows)  # divides the rows, and is no larger than before
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
