"""This machine's NVIDIA cards, read through NVML: no torch, no CUDA context, nothing allocated."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil
import pynvml

from finetune.errors import RecipeError
from finetune.units import format_bytes

_NO_CARD = "Plan for a catalogue card (finetune plan RECIPE --gpu rtx-4090), or set gpu=cpu for a tiny model."


@dataclass(frozen=True)
class Device:
    """One card as the driver reports it. `total_bytes` is without the driver's reserve, as torch sees it."""

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] | None
    pcie_bytes_s: float | None
    holders: tuple[str, ...]


def read_device() -> Device:
    """The first card that this process may use. Raises RecipeError when there is none."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise RecipeError(
            f"gpu: auto, but this machine has no NVIDIA card that can be used ({_said(error)})", _NO_CARD
        ) from None
    try:
        return _read(_first_visible())
    except pynvml.NVMLError as error:
        raise RecipeError(f"gpu: auto, but the driver can't describe the card ({_said(error)})", _NO_CARD) from None
    finally:
        pynvml.nvmlShutdown()


def read_devices() -> tuple[Device, ...]:
    """Every card that the driver sees, visible to this process or not. Raises pynvml.NVMLError when there is no driver."""
    pynvml.nvmlInit()
    try:
        return tuple(_read(pynvml.nvmlDeviceGetHandleByIndex(number)) for number in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def driver_versions() -> tuple[str, tuple[int, int]]:
    """The driver's version and the newest CUDA (major, minor) it runs. Raises pynvml.NVMLError when there is no driver."""
    pynvml.nvmlInit()
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        return _text(pynvml.nvmlSystemGetDriverVersion()), (cuda // 1000, cuda % 1000 // 10)
    finally:
        pynvml.nvmlShutdown()


def _first_visible() -> Any:
    """The first card of CUDA_VISIBLE_DEVICES, else the driver's first."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        if pynvml.nvmlDeviceGetCount() == 0:
            raise RecipeError("gpu: auto, but the driver sees no card", _NO_CARD)
        return pynvml.nvmlDeviceGetHandleByIndex(0)
    first = visible.split(",")[0].strip()
    if first in ("", "-1"):
        raise RecipeError(f"gpu: auto, but CUDA_VISIBLE_DEVICES={visible!r} hides every card", _NO_CARD)
    return pynvml.nvmlDeviceGetHandleByIndex(int(first)) if first.isdigit() else pynvml.nvmlDeviceGetHandleByUUID(first)


def _read(handle: Any) -> Device:
    total, free = _memory(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    return Device(
        name=_text(pynvml.nvmlDeviceGetName(handle)), total_bytes=total, free_bytes=free, capability=(major, minor),
        pcie_bytes_s=_pcie(handle), holders=_holders(handle),
    )  # fmt: skip


def _memory(handle: Any) -> tuple[int, int]:
    """Total less the driver's reserve, and free. Old drivers don't report the reserve and count it as used."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return memory.total - memory.reserved, memory.free
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument):
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return memory.total, memory.free


def _pcie(handle: Any) -> float | None:
    """Bytes per second one way, at 80 % of the link's rate: PCIe 3 carries 0.985 GB/s a lane, each later one twice that."""
    try:
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
        lanes = pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    except pynvml.NVMLError:
        return None
    return 0.8 * lanes * 0.985e9 * 2.0 ** (generation - 3) if generation and lanes else None


def _holders(handle: Any) -> tuple[str, ...]:
    """Processes that use the card's memory, largest first. Containers and Windows may hide them or their bytes."""
    held: dict[int, int | None] = {}
    for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            held.update({process.pid: process.usedGpuMemory for process in ask(handle)})
        except pynvml.NVMLError:
            continue
    ranked = sorted(held.items(), key=lambda item: (-(item[1] or 0), item[0]))
    return tuple(f"{_process(pid)} {format_bytes(count) if count else '(bytes unknown)'}" for pid, count in ranked)


def _process(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _said(error: Exception) -> str:
    return str(error).rstrip(".").lower()
