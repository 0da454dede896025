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

MAX_SLOWDOWN = 5.0  # slowest accepted step, as a multiple of its computing time: refuses hard disks and network drives
_OTHER_DRIVE = "set FINETUNE_CACHE to a folder on an NVMe drive"
#: Bytes of the sample and of each piece; limit in seconds for writing, and for reading.
SAMPLE_BYTES, PIECE_BYTES, MAX_S = 256 * MIB, 8 * MIB, 3.0


def check_layer_offloading(plan: Plan, *, force: bool = False, folder: Path | None = None) -> Plan:
    """Return the plan with the drive's measured speed. `force`: accept a slow drive. Raises MachineError or DiskFull."""
    check_host_memory(plan)
    copies = plan.layer_copies
    if copies is None or copies.place == "cpu" or plan.card.is_cpu:
        return plan
    folder = folder or cache_dir()
    if copies.weight_bytes > (free_bytes := free_disk_bytes(folder)):
        needed = f"the file of {copies.layers} layers needs {format_bytes(copies.weight_bytes)}"
        problem = f"{folder} has {format_bytes(free_bytes)} free, {needed}"
        raise DiskFull(problem, f"Free some space, or {_OTHER_DRIVE}.")
    read_bytes_s = measure_read_rate(folder)
    if read_bytes_s is None:
        return plan.with_note(f"the read speed of the drive of {folder} can't be measured on this system")
    measured = copies.at(min(read_bytes_s, plan.card.pcie_bytes_s or read_bytes_s))
    summary = f"the drive of {folder} reads {read_bytes_s / 1e9:.2f} GB/s; the run {measured.summary}"
    if not force and (measured.waiting_s or 0.0) > (MAX_SLOWDOWN - 1) * (measured.computing_s or math.inf):
        host_memory = f"{format_bytes(copies.weight_bytes)} of host memory"
        fix = f"Set layer_offloading=cpu with {host_memory}, {_OTHER_DRIVE}, or run anyway: --force."
        raise MachineError(f"layer_offloading nvme: {summary}", fix)
    return dataclasses.replace(plan, layer_copies=measured).with_note(summary)


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


def measure_read_rate(folder: Path, sample_bytes: int = SAMPLE_BYTES) -> float | None:
    """Return bytes per second of uncached reads in `folder`; None on Windows. Raises DiskFull."""
    if not hasattr(os, "posix_fadvise"):  # Windows
        return None
    parent = existing_parent(folder)
    try:
        with tempfile.TemporaryFile(dir=parent, buffering=0) as file:
            piece, written_bytes = os.urandom(PIECE_BYTES), 0  # random, so that it can't be compressed
            deadline = time.monotonic() + MAX_S
            while written_bytes < sample_bytes and time.monotonic() < deadline:
                written_bytes += file.write(piece)
            os.fsync(file.fileno())
            # drop the file from the page cache: measure the drive
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            buffer, read_bytes, began = bytearray(PIECE_BYTES), 0, time.perf_counter()
            while read_bytes < written_bytes and time.perf_counter() < began + MAX_S:
                read_bytes += file.readinto(buffer)
            return read_bytes / (time.perf_counter() - began)
    except OSError as error:
        problem = f"{parent}: a file of weights can't be written there: {error.strerror or error}"
        raise DiskFull(problem, "Free some space, or set FINETUNE_CACHE to a folder on another drive.") from None
