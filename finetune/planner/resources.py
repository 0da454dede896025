"""Memory budget, host memory and disk of a run, and their checks before layer offloading."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from finetune.card.card import Card, free_for_run, host_card
from finetune.errors import DiskFull, FinetuneError, MachineError, RecipeError
from finetune.files import cache_dir, free_disk_bytes
from finetune.memory.forecast import Forecast
from finetune.planner.plan import Choices, Plan, ResourceCheck
from finetune.planner.shape import ModelShape
from finetune.planner.speed import Job
from finetune.planner.strategy import Strategy
from finetune.settings import Recipe, Settings
from finetune.settings.base_formats import BITS_16, NF4
from finetune.settings.schema import AUTO
from finetune.units import GIB, format_bytes, parse_bytes


def check_resources(settings: Settings, forecast: Forecast, card: Card) -> tuple[ResourceCheck, ...]:
    """Compare needed with free host memory and disk."""
    # a catalogue card is in another machine, whose free disk is unknown
    disk = free_disk_bytes(Path(settings.output_dir)) if card.source != "catalogue" else None
    resources = (("host memory", forecast.host_bytes, free_host_bytes(settings, card)), ("disk", forecast.disk_bytes, disk))
    return tuple(ResourceCheck(what, needs, free, None if free is None else needs <= free) for what, needs, free in resources)


def free_host_bytes(recipe: Recipe, card: Card) -> int | None:
    """Return the host memory that a run may use; None if unknown."""
    if card.is_cpu:  # host memory is already the card's memory
        return None
    limits = [parse_bytes(recipe.host_memory)] if recipe.host_memory else []
    if card.source != "catalogue":
        limits.append(host_card().free_bytes)
    return min(limits, default=None)


def pinned_bytes(strategy: Strategy, job: Job) -> int:
    """Return the pinned host memory of a strategy."""
    weight_bytes = strategy.offloaded * job.shape.layer_bytes(strategy.base) if strategy.offload_target == "cpu" else 0
    if strategy.checkpointing != "offload":
        return weight_bytes
    # a layer's input in 16 bit; torch rounds pinned memory up to powers of two
    input_bytes = 2 * job.shape.hidden * job.micro_batch_tokens(strategy, job.width)
    return weight_bytes + strategy.recomputed_layers(job.shape.layers) * 2 ** math.ceil(math.log2(input_bytes))


def pinned_inputs_note(strategy: Strategy, job: Job, recipe: Recipe, host_free_bytes: int | None) -> str:
    """Return a note if host memory is too small to offload the layers' inputs."""
    offloading_strategy = replace(strategy, checkpointing="offload", every_n=1)
    needed_bytes = pinned_bytes(offloading_strategy, job)
    if recipe.activation_checkpointing != AUTO or host_free_bytes is None or needed_bytes <= host_free_bytes:
        return ""
    return (
        f"activation_checkpointing=offload was not tried: it pins {format_bytes(needed_bytes)} of host memory; "
        f"{format_bytes(max(0, host_free_bytes))} are available"
    )


def offloading_error(recipe: Recipe, shape: ModelShape, host_free_bytes: int | None) -> FinetuneError:
    """Return why this model's layers can't be offloaded."""
    layer_bytes = shape.layer_bytes(NF4 if recipe.load_in_4bit is not False else BITS_16)
    count = shape.layers if recipe.offloaded_layers == AUTO else recipe.offloaded_layers
    if host_free_bytes is not None and count * layer_bytes > host_free_bytes:
        return too_little_host_memory("cpu", count, count * layer_bytes, host_free_bytes)
    return RecipeError(
        f"layer_offloading {recipe.layer_offloading}: the weights of {recipe.model_name_or_path} are stored in int8, "
        "and int8 layers keep copies outside the buffers",
        "Give a 16-bit or 4-bit model.",
    )


def too_little_host_memory(target: str, layers: int, needed_bytes: int, free_bytes: int) -> MachineError:
    """Return the error of a machine that can't hold the offloaded layers."""
    close = "Set layer_offloading=nvme to read layers from a file; or close" if target == "cpu" else "Close"
    return MachineError(
        f"layer_offloading {target}: {layers} layers need {format_bytes(needed_bytes)} of pinned host memory; "
        f"{format_bytes(max(0, free_bytes))} are available",
        f"{close} programs, give a container or WSL more memory, or take a smaller model.",
    )


def choose_budget(choices: Choices, card: Card) -> tuple[Choices, int]:
    """Resolve memory_budget, and return its bytes. Raises RecipeError if the CUDA context exceeds it."""
    # rounded down to hundredths, so that the text never exceeds the free memory
    free_text = f"{math.floor(card.free_bytes / GIB * 100) / 100:.2f}GiB"
    budget_bytes, budget_text = parse_bytes(free_text), f"{format_bytes(card.free_bytes)} free"
    choices = choices.choose("memory_budget", free_text, f"free of the {format_bytes(card.total_bytes)} on {card.name}")
    if choices.is_set("memory_budget"):
        wanted_bytes = parse_bytes(choices.recipe.memory_budget)
        if wanted_bytes > card.free_bytes:
            only = f", but only {format_bytes(card.free_bytes)} are free"
            choices = choices.with_reason("memory_budget", choices.reasons["memory_budget"] + only)
        budget_bytes = min(wanted_bytes, card.free_bytes)
        budget_text = f"memory_budget {choices.recipe.memory_budget}"
    context_bytes = (card.context_bytes or 0) + card.context_uncertainty_bytes
    if budget_bytes <= context_bytes:
        raise RecipeError(
            f"{budget_text} on {card.name}, but the CUDA context alone may take {format_bytes(context_bytes)}",
            "Raise memory_budget, or free GPU memory.",
        )
    return choices, budget_bytes


def check_layer_offloading(plan: Plan) -> None:
    """Raise MachineError or DiskFull when too little host memory or disk is free for the offloaded layers."""
    check_host_memory(plan)
    copies = plan.layer_copies
    if copies is None or copies.place == "cpu" or plan.card.is_cpu:
        return
    folder = cache_dir()
    if copies.weight_bytes > (free_bytes := free_disk_bytes(folder)):
        needed = f"the file of {copies.layers} layers needs {format_bytes(copies.weight_bytes)}"
        problem = f"{folder} has {format_bytes(free_bytes)} free, {needed}"
        raise DiskFull(problem, "Free some space, or set FINETUNE_CACHE to a folder on an NVMe drive.")


def check_host_memory(plan: Plan) -> None:
    """Raise MachineError when too little host memory is free for the offloaded layers."""
    copies = plan.layer_copies
    # a retry or resume may have changed the setting
    if copies is None or plan.card.is_cpu or copies.place != plan.settings.layer_offloading:
        return
    free_bytes = free_for_run()
    needed_bytes = max(copies.pinned_bytes, copies.weight_bytes) if copies.place == "cpu" else copies.pinned_bytes
    if needed_bytes > free_bytes:
        raise too_little_host_memory(copies.place, copies.layers, needed_bytes, free_bytes)
