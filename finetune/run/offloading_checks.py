"""Checks before a run that layer offloading has what it needs: host memory, or a drive that reads fast enough."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from finetune.card.host import free_for_run
from finetune.errors import DiskFull, MachineError
from finetune.files import cache_dir, free_disk_bytes
from finetune.planner.plan import LayerCopies, Plan
from finetune.planner.resources import too_little_host_memory
from finetune.run.disk_speed import measure_read_rate
from finetune.units import format_bytes

#: A drive with which a step takes more than so many times its arithmetic is refused: one of spinning discs, or over a network.
MOST_TIMES = 5.0
_OTHER_DRIVE = "set FINETUNE_CACHE to a folder on an NVMe drive"


def check_layer_offloading(plan: Plan, *, force: bool = False, folder: Path | None = None) -> Plan:
    """The plan with what was measured of the drive. `force` accepts what is only slow; `folder`: where an offload's file is.

    Raises MachineError and DiskFull for what this machine lacks.
    """
    check_host_memory(plan)
    copies = plan.layer_copies
    if copies is None or copies.place == "cpu" or plan.card.is_cpu:
        return plan
    return _with_drive(plan, copies, folder or cache_dir(), force=force)


def check_host_memory(plan: Plan) -> None:
    """Raise MachineError when less is free than the plan's offloaded layers need; before they are loaded."""
    copies = plan.layer_copies
    if copies is None or plan.card.is_cpu or copies.place != plan.settings.layer_offloading:  # a retry or resume changed it
        return
    free = free_for_run()
    needed = max(copies.pinned_bytes, copies.weight_bytes) if copies.place == "cpu" else copies.pinned_bytes
    if needed > free:
        raise too_little_host_memory(copies.place, copies.layers, needed, free)


def _with_drive(plan: Plan, copies: LayerCopies, folder: Path, *, force: bool) -> Plan:
    # counts the file of an earlier run, which is reused or replaced when it is opened
    available = free_disk_bytes(folder) + sum(path.stat().st_size for path in folder.glob("quantised/*.safetensors"))
    if copies.weight_bytes > available:
        raise DiskFull(
            f"{folder} has {format_bytes(available)} free, the file of {copies.layers} layers needs "
            f"{format_bytes(copies.weight_bytes)}",
            f"Free some space, or {_OTHER_DRIVE}.",
        )
    rate = measure_read_rate(folder)
    if rate is None:
        return plan.with_note(f"how fast the drive of {folder} reads is not measured on this system")
    seen = copies.at(min(rate, plan.card.pcie_bytes_s or rate))
    summary = f"the drive of {folder} reads {rate / 1e9:.2f} GB/s; the run {seen.summary}"
    if not force and (seen.waiting_s or 0.0) > (MOST_TIMES - 1) * (seen.computing_s or math.inf):
        raise MachineError(
            f"layer_offloading nvme: {summary}",
            f"Set layer_offloading=cpu with {format_bytes(copies.weight_bytes)} of host memory, {_OTHER_DRIVE}, "
            "or run anyway: --force.",
        )
    return dataclasses.replace(plan, layer_copies=seen).with_note(summary)
