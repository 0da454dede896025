"""Checks of layer offloading: host memory, speed of the drive."""

from __future__ import annotations

import dataclasses
import math
import os
import tempfile
import time
from pathlib import Path

from finetune.card.host import free_for_run
from finetune.errors import DiskFull, MachineError
from finetune.files import cache_dir, existing_parent, free_disk_bytes
from finetune.planner.plan import Plan
from finetune.planner.resources import too_little_host_memory
from finetune.units import MIB, format_bytes

MOST_TIMES = 5.0  # slowest accepted step, as a multiple of its computing time: refuses hard disks and network drives
_OTHER_DRIVE = "set FINETUNE_CACHE to a folder on an NVMe drive"
#: Bytes of the sample and of each piece; limit in seconds for writing, and for reading.
SAMPLE_BYTES, PIECE_BYTES, MOST_S = 256 * MIB, 8 * MIB, 3.0


def check_layer_offloading(plan: Plan, *, force: bool = False, folder: Path | None = None) -> Plan:
    """Return the plan with the drive's measured speed. Raises MachineError or DiskFull."""
    check_host_memory(plan)
    copies = plan.layer_copies
    if copies is None or copies.place == "cpu" or plan.card.is_cpu:
        return plan
    folder = folder or cache_dir()
    # files of an earlier run are reused or replaced
    available = free_disk_bytes(folder) + sum(path.stat().st_size for path in folder.glob("quantised/*.quantised/*"))
    if copies.weight_bytes > available:
        raise DiskFull(
            f"{folder} has {format_bytes(available)} free, the file of {copies.layers} layers needs "
            f"{format_bytes(copies.weight_bytes)}",
            f"Free some space, or {_OTHER_DRIVE}.",
        )
    rate = measure_read_rate(folder)
    if rate is None:
        return plan.with_note(f"the read speed of the drive of {folder} can't be measured on this system")
    seen = copies.at(min(rate, plan.card.pcie_bytes_s or rate))
    summary = f"the drive of {folder} reads {rate / 1e9:.2f} GB/s; the run {seen.summary}"
    if not force and (seen.waiting_s or 0.0) > (MOST_TIMES - 1) * (seen.computing_s or math.inf):
        raise MachineError(
            f"layer_offloading nvme: {summary}",
            f"Set layer_offloading=cpu with {format_bytes(copies.weight_bytes)} of host memory, {_OTHER_DRIVE}, "
            "or run anyway: --force.",
        )
    return dataclasses.replace(plan, layer_copies=seen).with_note(summary)


def check_host_memory(plan: Plan) -> None:
    """Raise MachineError when too little host memory is free for the offloaded layers."""
    copies = plan.layer_copies
    # a retry or resume may have changed the setting
    if copies is None or plan.card.is_cpu or copies.place != plan.settings.layer_offloading:
        return
    free = free_for_run()
    needed = max(copies.pinned_bytes, copies.weight_bytes) if copies.place == "cpu" else copies.pinned_bytes
    if needed > free:
        raise too_little_host_memory(copies.place, copies.layers, needed, free)


def measure_read_rate(folder: Path, sample_bytes: int = SAMPLE_BYTES) -> float | None:
    """Return bytes per second of uncached reads in `folder`; None on Windows. Raises DiskFull."""
    if not hasattr(os, "posix_fadvise"):  # Windows
        return None
    parent = existing_parent(folder)
    try:
        with tempfile.TemporaryFile(dir=parent, buffering=0) as file:
            written, piece, end = 0, os.urandom(PIECE_BYTES), time.monotonic() + MOST_S
            while written < sample_bytes and time.monotonic() < end:
                written += file.write(piece)
            os.fsync(file.fileno())
            # drop the file from the page cache: measure the drive
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            buffer, n_read, begin = bytearray(PIECE_BYTES), 0, time.perf_counter()
            while n_read < written and time.perf_counter() < begin + MOST_S:
                n_read += file.readinto(buffer)
            return n_read / (time.perf_counter() - begin)
    except OSError as error:
        raise DiskFull(
            f"{parent}: a file of weights can't be written there: {error.strerror or error}",
            "Free some space, or set FINETUNE_CACHE to a folder on another drive.",
        ) from None
