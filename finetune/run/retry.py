"""Out of memory: its event and explanation, the next smaller plan, and the saved changes."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import traceback
from pathlib import Path
from typing import Any

from finetune.card.card import free_for_run
from finetune.errors import CommandError, FinetuneError
from finetune.events import Memory, OutOfMemory
from finetune.files import from_json, read_json, to_json, write_json
from finetune.memory.forecast import Forecast, PhaseForecast
from finetune.model.configuration import read_config
from finetune.planner.plan import AS_SET, Plan, read_plan
from finetune.run.directory import RunDirectory
from finetune.settings import resolved
from finetune.settings.base_formats import NF4
from finetune.settings.compatibility import lean_layers_conflict
from finetune.settings.schema import Decides, settings_that_decide
from finetune.units import format_bytes

MOST_RETRIES = 4
_CHECKPOINT_EVERY_LAYER = {"activation_checkpointing": True, "activation_checkpointing_every_n_layers": 1}


def adjusted_plan(run: RunDirectory) -> Plan:
    """Return the run's plan with the changes of its retries. Raises CommandError."""
    plan = read_plan(run.plan)
    try:
        adjustments = _read_adjustments(run)
        if not adjustments.changes:
            return plan
        if _affect(adjustments.changes, Decides.SPEED):  # the modelled time is of other settings
            plan = dataclasses.replace(plan, modelled_step_s=None)
        settings = resolved(plan.settings, **adjustments.changes)
        return dataclasses.replace(plan, settings=settings, forecast=adjustments.forecast or plan.forecast)
    except (OSError, ValueError) as error:
        raise CommandError(f"{run.adjustments}: {error}", f"Start a new run: finetune run {run.recipe}") from None


def reforecast_adjusted(run: RunDirectory) -> Plan:
    """Return the adjusted plan with a new, saved forecast, or without a forecast if forecasting fails."""
    plan, adjustments = adjusted_plan(run), _read_adjustments(run)
    if plan.forecast is None or adjustments.forecast or not _affect(adjustments.changes, Decides.BYTES):
        return plan
    from datasets import load_from_disk

    from finetune.methods.row_order import row_lengths, trained_counts
    from finetune.planner.planning import reforecast, statistics_of_lengths

    try:
        token_counts: list[Any] = []  # plan.json has no lengths
        for folder in (run.data / "train", run.data / "eval"):
            if folder.is_dir():
                rows = load_from_disk(str(folder))
                token_counts += [row_lengths(rows), trained_counts(rows)]
        forecast = reforecast(plan, statistics_of_lengths(*token_counts))
    except Exception:  # noqa: BLE001 - a forecast of other settings would mislead, none is fine
        traceback.print_exc()
        return dataclasses.replace(plan, forecast=None)
    with contextlib.suppress(OSError):  # a full disk: the next attempt forecasts again
        adjustments = dataclasses.replace(adjustments, forecast=forecast, since_s=time.time())
        write_json(run.adjustments, to_json(adjustments), checksum=True)
    return dataclasses.replace(plan, forecast=forecast)


def adjusted_since_s(run: RunDirectory) -> float:
    """Return the time of the last change of memory settings, or 0."""
    try:
        return _read_adjustments(run).since_s
    except (OSError, ValueError):  # `adjusted_plan` reports the damage
        return 0.0


def adjust(run: RunDirectory, changes: dict[str, Any]) -> None:
    """Save changes for the next attempts."""
    before = _read_adjustments(run)
    all_changes = {**before.changes, **changes}
    keeps_forecast = not _affect(changes, Decides.BYTES)  # a forecast of other settings would mislead
    after = dataclasses.replace(before, changes=all_changes) if keeps_forecast else _Adjustments(all_changes)
    write_json(run.adjustments, to_json(after), checksum=True)


def next_smaller(plan: Plan, phase: str) -> dict[str, Any] | None:
    """Return changes that need less memory at the same effective batch size, or None."""
    # only settings whose row in the schema does not decide RESULT: the checkpoints must stay usable
    settings = plan.settings
    if phase == "load":  # the other changes do not reduce its memory
        return _embedding_in_host_memory(plan) or _layers_in_host_memory(plan)
    least_rows = settings.training_method.min_rows
    if phase == "evaluate" and settings.per_device_eval_batch_size > least_rows:
        return {"per_device_eval_batch_size": max(least_rows, settings.per_device_eval_batch_size // 2)}
    rows, steps = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    # first the micro-batch, then gradient checkpointing, its offload, the embedding, the layers
    divisor = next((number for number in range(2, rows + 1) if rows % number == 0 and rows // number >= least_rows), None)
    if divisor and not settings.packing:
        return {"per_device_train_batch_size": rows // divisor, "gradient_accumulation_steps": steps * divisor}
    if settings.activation_checkpointing is False or settings.activation_checkpointing_every_n_layers > 1:
        return {**_CHECKPOINT_EVERY_LAYER}
    # ZeRO-3 can't offload the checkpoints
    if settings.activation_checkpointing in (True, "selective") and not settings.launch.is_zero3:
        return {"activation_checkpointing": "offload", "activation_checkpointing_every_n_layers": 1}
    return _embedding_in_host_memory(plan) or _layers_in_host_memory(plan)


def _embedding_in_host_memory(plan: Plan) -> dict[str, Any] | None:
    # the recipe's own value is not changed
    if plan.reasons.get("offload_embeddings") == AS_SET or plan.settings.offload_embeddings or plan.card.is_cpu:
        return None
    changes = {"offload_embeddings": True}
    with contextlib.suppress(ValueError, FinetuneError):  # excluded by another setting, or no configuration
        resolved(plan.settings, **changes)
        config = read_config(plan.settings)
        # a tied table is also the output layer, which stays on the GPU
        if config.get("text_config", config).get("tie_word_embeddings", config.get("tie_word_embeddings")) is False:
            return changes
    return None


def _layers_in_host_memory(plan: Plan) -> dict[str, Any] | None:
    settings, forecast = plan.settings, plan.forecast
    # as above: the recipe's own value is not changed
    if plan.reasons.get("layer_offloading") == AS_SET or settings.layer_offloading is not False:
        return None
    if plan.card.is_cpu or forecast is None or forecast.peaks["load"] > free_for_run():
        return None
    changes: dict[str, Any] = {"layer_offloading": "cpu", "offloaded_layers": forecast.layers}
    if settings.torch_compile and plan.reasons["torch_compile"] != AS_SET:
        changes |= {"torch_compile": False, "lean_layers": not lean_layers_conflict(resolved(settings, torch_compile=False))}
    if settings.activation_checkpointing is False or settings.activation_checkpointing_every_n_layers > 1:
        changes |= _CHECKPOINT_EVERY_LAYER
    with contextlib.suppress(ValueError):  # another setting excludes the offload
        resolved(settings, **changes)
        return changes
    return None


def no_smaller_plan_message(plan: Plan, phase: str, holders: list[str], recipe: Path) -> str:
    """Return the message for out of memory without a smaller plan."""
    command = f"finetune plan {recipe}"
    if phase != "load":
        advice = f"use a shorter max_length or a smaller model: {command}"
        return f"out of memory in phase {phase}, and no smaller plan is left to try; {advice}"
    needs = f" ({format_bytes(plan.forecast.peaks['load'])} by the forecast)" if plan.forecast else ""
    close = f"close other programs on the GPU ({', '.join(holders[:6])}), or " if holders else ""
    quantise = "" if plan.settings.base_format.bits == NF4.bits else f"{NF4.setting}=true or "
    advice = f"{close}plan again with {quantise}a smaller model: {command}"
    return f"out of memory while loading the model{needs}; a smaller micro-batch does not help: {advice}"


def _affect(changes: dict[str, Any], effects: Decides) -> bool:
    return not changes.keys().isdisjoint(settings_that_decide(effects))


@dataclasses.dataclass(frozen=True)
class _Adjustments:
    changes: dict[str, Any]
    forecast: Forecast | None = None  # with the changes
    since_s: float = 0.0  # when the forecast was made


def _read_adjustments(run: RunDirectory) -> _Adjustments:
    return from_json(_Adjustments, read_json(run.adjustments, dict)) if run.adjustments.exists() else _Adjustments({})


def out_of_memory_event(error: BaseException, phase: str, plan: Plan, memory: Memory) -> OutOfMemory:
    """Return an error's event; `memory` is measured afterwards."""
    forecast = plan.forecast.of_phase(phase) if plan.forecast else PhaseForecast()
    message = str(error).split("\n")[0] or f"{type(error).__name__}."  # a MemoryError has no text
    return OutOfMemory(
        phase=phase, message=message[:800],  # torch lists every process on the GPU
        micro_batch=plan.settings.per_device_train_batch_size, max_length=plan.settings.max_length,
        forecast_allocated_bytes=forecast.allocated_bytes, forecast_reserved_bytes=forecast.reserved_bytes, **vars(memory),
    )  # fmt: skip


def explanation(event: OutOfMemory) -> str:
    """Return the error's message, then forecast and measured memory of the phase."""
    if event.forecast_allocated_bytes is None:
        return event.message
    expected = _sizes(event.forecast_allocated_bytes, event.forecast_reserved_bytes)
    measured = _sizes(event.peak_allocated_bytes, event.peak_reserved_bytes)
    result = f"; at the failure: {measured}" if measured else ""
    return f"{event.message.rstrip('.')}. The plan expected at most {expected} in phase {event.phase}{result}."


def _sizes(allocated: int | None, reserved: int | None) -> str:
    sizes = {"allocated": allocated, "reserved": reserved}
    return " and ".join(f"{format_bytes(size)} {name}" for name, size in sizes.items() if size is not None)
