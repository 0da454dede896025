"""This machine's NVIDIA cards, read through NVML: no torch, no CUDA context, nothing allocated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

from finetune.units import format_bytes

#: The PID namespace that every Linux machine starts with (include/linux/proc_ns.h); another one is a container's, or WSL's.
FIRST_NAMESPACE = "pid:[4026531836]"
#: NVML's answers when an older driver lacks a function, or this card has no value.
_MISSING = (
    pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument,
    pynvml.NVMLError_ArgumentVersionMismatch, pynvml.NVMLLibraryMismatchError,
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """One card, or one MIG instance of a card, as the driver reports it.

    `total_bytes`: without the driver's reserve, as torch sees it. `holders`: processes that use its memory, as text. `index`:
    as nvidia-smi counts, `0:1` for an instance. `speed`: cores x MHz, which orders cards; 0 when unknown.
    """

    name: str
    total_bytes: int
    free_bytes: int
    capability: tuple[int, int] | None
    pcie_bytes_s: float | None
    holders: tuple[str, ...]
    index: str = "0"
    uuid: str | None = None
    speed: int = 0

    @property
    def is_instance(self) -> bool:
        """Whether it is a part of a split card (MIG)."""
        return ":" in self.index


@dataclass(frozen=True)
class LostCard:
    """A card that the driver lists and can't describe; `why` in the driver's words."""

    index: str
    why: str


def read_devices() -> tuple[tuple[Device, ...], tuple[LostCard, ...]]:
    """Every card that the driver sees, visible to this process or not, and those that don't answer.

    A card split by MIG is replaced by its instances: CUDA uses nothing else of it. Raises pynvml.NVMLError without a driver.
    """
    pynvml.nvmlInit()
    try:
        devices: list[Device] = []
        lost_cards: list[LostCard] = []
        for number in range(pynvml.nvmlDeviceGetCount()):
            try:
                devices += _of_card(number)
            except pynvml.NVMLError as error:
                lost_cards.append(LostCard(str(number), driver_message(error)))
        return tuple(devices), tuple(lost_cards)
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


def read_memory(handle: Any) -> tuple[int, int, int]:
    """Bytes of a card: total less the driver's reserve, free, and used by processes.

    Drivers before 510 don't report the reserve and count it as used.
    """
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return memory.total - memory.reserved, memory.free, memory.used
    except _MISSING:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return memory.total, memory.free, memory.used


def memory_of_processes(handle: Any) -> dict[int, int | None] | None:
    """Bytes by process id, of compute and graphics; None bytes where they are unknown (Windows, WSL) or 0.

    None when the driver lists no processes, or with ids that mean nothing here: in a container they are the host's.
    """
    if in_container():
        return None
    bytes_by_pid: dict[int, int | None] = {}
    for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            processes = ask(handle)
        except _MISSING:
            return None
        # a process with both kinds of contexts is in both lists, with all its bytes in each
        bytes_by_pid.update({process.pid: process.usedGpuMemory or None for process in processes})
    return bytes_by_pid


def in_container() -> bool:
    """Whether process ids here are not the machine's own, as in a container or under WSL."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) != FIRST_NAMESPACE
    except OSError:  # not Linux
        return False


def driver_message(error: Exception) -> str:
    """The message of a driver error, for the middle of a sentence."""
    return str(error).rstrip(".").lower()


def _of_card(number: int) -> Iterator[Device]:
    card = pynvml.nvmlDeviceGetHandleByIndex(number)
    try:
        split = pynvml.nvmlDeviceGetMigMode(card)[0] == 1
    except _MISSING:
        split = False
    if not split:
        yield _read(card, card, str(number))
        return
    for instance_index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(card)):
        try:
            instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(card, instance_index)
        except (pynvml.NVMLError_NotFound, *_MISSING):
            continue
        yield _read(instance, card, f"{number}:{instance_index}")


def _read(handle: Any, card: Any, index: str) -> Device:
    """`card`: the handle of the whole card, which knows what an instance does not."""
    total, free, _ = read_memory(handle)
    major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(card)
    return Device(
        name=_text(pynvml.nvmlDeviceGetName(handle)), total_bytes=total, free_bytes=free, capability=(major, minor),
        pcie_bytes_s=_pcie(card), holders=_holders(handle, total - free), index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)), speed=_speed(card),
    )  # fmt: skip


def _speed(card: Any) -> int:
    try:
        return pynvml.nvmlDeviceGetNumGpuCores(card) * pynvml.nvmlDeviceGetMaxClockInfo(card, pynvml.NVML_CLOCK_SM)
    except _MISSING:
        return 0


def _pcie(card: Any) -> float | None:
    """Bytes per second one way, at 80 % of the link's rate: PCIe 3 carries 0.985 GB/s a lane, each later one twice that."""
    try:
        generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(card)
        lanes = pynvml.nvmlDeviceGetMaxPcieLinkWidth(card)
    except _MISSING:
        return None
    return 0.8 * lanes * 0.985e9 * 2.0 ** (generation - 3) if generation and lanes else None


def _holders(handle: Any, used_bytes: int) -> tuple[str, ...]:
    """Processes that use the card's memory, largest first."""
    bytes_by_pid = memory_of_processes(handle)
    if bytes_by_pid is None:
        hidden = ("programs that can't be named from here (a container, or WSL)",)
        return hidden if in_container() and used_bytes else ()
    ranked = sorted(bytes_by_pid.items(), key=lambda item: (-(item[1] or 0), item[0]))
    return tuple(f"{_process(pid)} {format_bytes(count) if count else '(bytes unknown)'}" for pid, count in ranked)


def _process(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
