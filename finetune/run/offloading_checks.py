"""Checks of layer offloading before a run: enough host memory, or a drive that reads fast enough."""

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
from finetune.planner.plan import LayerCopies, Plan
from finetune.planner.resources import too_little_host_memory
from finetune.units import MIB, format_bytes

#: A drive with which a step takes more than so many times its arithmetic is refused: one of spinning discs, or over a network.
MOST_TIMES = 5.0
_OTHER_DRIVE = "set FINETUNE_CACHE to a folder on an NVMe drive"
#: Bytes that are written and read, one piece after another, and the seconds that each of both takes at most.
SAMPLE_BYTES, PIECE_BYTES, MOST_S = 256 * MIB, 8 * MIB, 3.0


def check_layer_offloading(plan: Plan, *, force: bool = False, folder: Path | None = None) -> Plan:
    """Return the plan with the measured speed of the drive. `force` accepts a slow drive; `folder`: of the offloaded layers.

    Raises MachineError for too little host memory or too slow a drive, DiskFull for too little space.
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
    # counts the files of an earlier run, which are reused or replaced when they are opened
    available = free_disk_bytes(folder) + sum(path.stat().st_size for path in folder.glob("quantised/*.quantised/*"))
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


def measure_read_rate(folder: Path, sample_bytes: int = SAMPLE_BYTES) -> float | None:
    """Bytes per second that are read of a new file in `folder`, past the system's cache; None where that can't be avoided.

    Takes up to two times MOST_S and leaves nothing. Raises DiskFull when the file can't be written.
    """
    if not hasattr(os, "posix_fadvise"):  # Windows
        return None
    parent = existing_parent(folder)
    try:
        with tempfile.TemporaryFile(dir=parent, buffering=0) as file:
            written, piece, end = 0, os.urandom(PIECE_BYTES), time.monotonic() + MOST_S
            while written < sample_bytes and time.monotonic() < end:
                written += file.write(piece)
            os.fsync(file.fileno())
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
