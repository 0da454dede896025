"""Checks of layer offloading: host memory, free disk."""

from __future__ import annotations

from finetune.card.card import free_for_run
from finetune.errors import DiskFull
from finetune.files import cache_dir, free_disk_bytes
from finetune.planner.plan import Plan
from finetune.planner.resources import too_little_host_memory
from finetune.units import format_bytes


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
