"""Facts of one GPU, or of the CPU with a container's memory limit; settings of torch's CUDA allocator."""

from __future__ import annotations

import contextlib
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from finetune.units import MIB, format_bytes


@dataclass(frozen=True)
class Card:
    """Facts of one GPU. Units: bytes and FLOP per second. A missing fact stays None.

    `total_bytes`: as torch sees it. `free_bytes`: free now (catalogue: without a desktop's usual share). `bf16_flops`,
    `fp32_flops` and `bandwidth_bytes_s`: published rates; training steps reach `flops_share` and `bandwidth_share`. If
    `rates_measured_at` is set, all rates are measured on this machine. `context_bytes`: the CUDA context, which torch's
    allocator does not count. `problem`: why the installed torch can't use this GPU.
    """

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] | None = None  # CUDA compute capability; None for a CPU
    bf16_flops: float | None = None
    fp32_flops: float | None = None  # for GPUs without bf16
    bandwidth_bytes_s: float | None = None
    flops_share: float = 0.85  # large matrix products reach 140 of 165 TFLOP/s on a 4090
    bandwidth_share: float = 1.0
    attention_flops: float | None = None
    launch_s: float | None = None
    rates_measured_at: str = ""
    pcie_bytes_s: float | None = None
    context_bytes: int | None = None
    context_uncertainty_bytes: int = 0
    source: str = "catalogue"  # catalogue | measured | cpu
    reason: str = ""
    uuid: str | None = None  # for CUDA_VISIBLE_DEVICES; only for a GPU of this machine
    problem: str = ""
    problem_fix: str = ""

    @property
    def is_cpu(self) -> bool:
        return self.source == "cpu"

    @property
    def supports_bf16(self) -> bool:
        return self.is_cpu or (self.capability is not None and self.capability >= (8, 0))  # Turing trains in fp16


#: Resident memory of a process after importing torch, transformers, TRL, PEFT and datasets (measured on Linux).
PROCESS_BYTES = 800 * MIB


def host_card() -> Card:
    """Return the CPU as a Card."""
    memory = psutil.virtual_memory()
    total, free, location = memory.total, memory.available, "this machine"
    limit = _cgroup("memory.max", "memory/memory.limit_in_bytes")  # v2 writes `max` for none, v1 a number near 2^63
    if limit is not None and limit < total:
        used = _cgroup("memory.current", "memory/memory.usage_in_bytes") or 0
        total, free, location = limit, min(free, max(limit - used, 0)), "this container"
    return Card(
        name="cpu", total_bytes=total, free_bytes=free, context_bytes=0, source="cpu",
        reason=f"CPU: {format_bytes(free)} of {format_bytes(total)} host memory available on {location}",
    )  # fmt: skip


def free_for_run() -> int:
    """Return the free host memory less PROCESS_BYTES."""
    return host_card().free_bytes - PROCESS_BYTES


def _cgroup(*names: str) -> int | None:
    for name in names:
        with contextlib.suppress(OSError):
            text = (Path("/sys/fs/cgroup") / name).read_text(encoding="ascii").strip()
            if text.isdigit():
                return int(text)
    return None


def has_windows_driver() -> bool:
    """Tell whether this is Windows or WSL."""
    # the only drivers that fall back to host memory when the GPU is full
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


def expandable_segments() -> bool:
    """Tell whether a run here gets expandable segments."""
    return not has_windows_driver()  # neither on native Windows, nor under WSL (pytorch#192330)


def allocator_environment() -> dict[str, str]:
    """Return the environment variables to set before importing torch."""
    return {"PYTORCH_ALLOC_CONF": "expandable_segments:True"} if expandable_segments() else {}
