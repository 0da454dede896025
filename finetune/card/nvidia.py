"""This machine's GPUs through NVML, without a CUDA context. Queries raise DriverError."""

# Other places that assume NVIDIA: `kernels_by_device` in compat/transformers.py, compat/triton.py, `must_repeat_keys` in
# model/build.py, `DEFAULT_CAPABILITY` in memory/ledger.py, `CUBLASLT_BYTES` in memory/tracker.py, `uuid` in card/cuda.py,
# `allocator_environment` in card/card.py, errors.py, cards.json, and texts with NVIDIA, nvidia-smi or CUDA.

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pynvml

from finetune.units import format_bytes

#: Initial PID namespace of every Linux machine (include/linux/proc_ns.h); containers and WSL have other namespaces.
FIRST_NAMESPACE = "pid:[4026531836]"
WHEEL_FIX = (
    "Install the wheel for your GPU: uv pip install --reinstall --torch-backend=auto torch, or choose one at "
    "https://pytorch.org/get-started/locally/"
)


class DriverError(Exception):
    """The driver is missing or does not answer."""

    def __init__(self, message: str, *, was_updated: bool = False) -> None:
        super().__init__(message)
        #: The driver no longer fits its library until the machine restarts.
        self.was_updated = was_updated


@dataclass(frozen=True)
class Device:
    """One GPU as reported by the driver."""

    name: str
    total_bytes: int  # without the driver's reserve, as torch sees it
    free_bytes: int
    capability: tuple[int, int] | None
    pcie_bytes_s: float | None
    holders: tuple[str, ...]  # processes that use its memory, as text
    index: str = "0"  # as in nvidia-smi
    uuid: str = ""
    driver: str = ""
    power_limit_w: float | None = None  # None if unreadable


@dataclass(frozen=True)
class LostCard:
    """A listed but unusable GPU; `why` in the driver's words."""

    index: str
    why: str
    fix: str


@dataclass(frozen=True)
class Build:
    """The installed torch, with its CUDA and ROCm versions."""

    version: str
    cuda: str | None
    hip: str | None = None

    @property
    def platform(self) -> str:
        """E.g. `CUDA 13.0` or `ROCm 7.1`; empty for a CPU-only build."""
        return f"ROCm {self.hip}" if self.hip else f"CUDA {self.cuda}" if self.cuda else ""


#: The driver's version, and its newest CUDA (major, minor).
Driver = tuple[str, tuple[int, int]]
#: Errors where an older driver lacks a function, or this GPU lacks the value.
_UNAVAILABLE = (
    pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported, pynvml.NVMLError_InvalidArgument,
    pynvml.NVMLError_ArgumentVersionMismatch, pynvml.NVMLLibraryMismatchError,
)  # fmt: skip
#: Oldest driver of each CUDA, for all its minor versions (CUDA toolkit release notes, table "minimum required driver
#: version for CUDA minor version compatibility"). Wheels of torch from PyPI are built for CUDA 13 from 2.11 on.
OLDEST_DRIVER = {12: "525", 13: "580"}
#: Oldest compute capability of each CUDA (release notes of CUDA 13.0: Maxwell, Pascal and Volta are no longer supported).
OLDEST_CAPABILITY = {13: (7, 5)}
_ARCHITECTURE = re.compile(r"(sm|compute)_(\d{2,3})([af]?)")

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
SEES_NONE = "-1"  # CUDA has no such device, and an empty value would unset the variable on Windows
DRIVER_ORDER = ("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # makes CUDA count GPUs as the driver does
UUID_PREFIX = "GPU-"
CONTAINER_FIX = "In a container, pass the GPU through (docker run --gpus all)."
LOST_FIX = "Restart the machine; the kernel log shows the cause (sudo dmesg | grep -i xid): often power, heat or a loose GPU."


@contextlib.contextmanager
def _driver_errors() -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as error:
        raise DriverError(str(error), was_updated=isinstance(error, pynvml.NVMLError_LibRmVersionMismatch)) from None


@contextlib.contextmanager
def _session() -> Iterator[None]:
    with _driver_errors():
        pynvml.nvmlInit()
        try:
            yield
        finally:
            pynvml.nvmlShutdown()


@_session()
def read_devices() -> tuple[tuple[Device, ...], tuple[LostCard, ...]]:
    """Return the usable and the unusable GPUs."""
    devices: list[Device] = []
    lost_cards: list[LostCard] = []
    for number in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            current_mode, *_ = _value_or_none(pynvml.nvmlDeviceGetMigMode, handle) or (pynvml.NVML_DEVICE_MIG_DISABLE,)
            if current_mode == pynvml.NVML_DEVICE_MIG_ENABLE:
                fix = f"Turn MIG off (sudo nvidia-smi -i {number} -mig 0)."
                lost_cards.append(LostCard(str(number), "split by MIG, which is not supported", fix))
            else:
                devices.append(_read_device(handle, str(number)))
        except (pynvml.NVMLError, DriverError) as error:
            lost_cards.append(LostCard(str(number), driver_message(error), LOST_FIX))
    return tuple(devices), tuple(lost_cards)


@_session()
def driver_versions() -> Driver:
    """Return the versions of the driver and its newest CUDA."""
    cuda = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    return pynvml.nvmlSystemGetDriverVersion(), (cuda // 1000, cuda % 1000 // 10)


@_driver_errors()
def open_device(uuid: str) -> OpenDevice:
    """Open a GPU; NVML stays open until the process ends."""
    pynvml.nvmlInit()
    return OpenDevice(pynvml.nvmlDeviceGetHandleByUUID(uuid))


def build_problem(build: Build, driver: Driver | None) -> tuple[str, str] | None:
    """Return why torch can't use the driver, and the fix."""
    if build.hip:
        return f"torch {build.version} is built for AMD GPUs (ROCm)", WHEEL_FIX
    if build.cuda is None:
        return f"torch {build.version} is a CPU-only build; the GPU is not used", WHEEL_FIX
    if driver is None:
        return None
    version, (major, minor) = driver
    build_major = int(build.cuda.split(".")[0])
    if build_major <= major:
        return None
    oldest = OLDEST_DRIVER.get(build_major)
    update = f"Update the driver to {oldest} or newer" if oldest else "Update the driver"
    return (
        f"torch {build.version} is built for CUDA {build.cuda}, but driver {version} supports CUDA up to {major}.{minor}",
        f"{update}, or install an older wheel. {WHEEL_FIX}",
    )


def capability_problem(build: Build, name: str, capability: tuple[int, int] | None) -> tuple[str, str] | None:
    """Return why torch can't use this GPU, and the fix."""
    if build.cuda is None or capability is None:
        return None
    oldest = OLDEST_CAPABILITY.get(int(build.cuda.split(".")[0]), (0, 0))
    if capability >= oldest:
        return None
    return (
        f"{name} has compute capability {capability[0]}.{capability[1]}, but CUDA {build.cuda} of torch {build.version} needs "
        f"{oldest[0]}.{oldest[1]} or later",
        "Wheels for CUDA 12.6 still have kernels for it: pip install torch --index-url https://download.pytorch.org/whl/cu126",
    )


def has_kernels(capability: tuple[int, int], architectures: list[str]) -> bool:
    """Tell whether a wheel for `architectures` (`sm_86`, `sm_90a`, `compute_120`) runs on this GPU."""
    for kind, number, feature in (match.groups() for match in map(_ARCHITECTURE.fullmatch, architectures) if match):
        # Binaries (sm) run on the same major and later minor versions, PTX (compute) on all later versions; suffix `a` allows
        # only this version, `f` its family (CUDA programming guide, "Compute Capability").
        built = (int(number[:-1]), int(number[-1]))
        in_family = built[0] == capability[0] or (kind == "compute" and feature != "f")
        if built == capability or (feature != "a" and in_family and built <= capability):
            return True
    return False


class OpenDevice:
    """A GPU that a run queries repeatedly. Methods raise DriverError."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    @_driver_errors()
    def memory(self) -> tuple[int, int, int]:
        """Return total bytes less the driver's reserve, free, and used."""
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle, version=pynvml.nvmlMemory_v2)
            return memory.total - memory.reserved, memory.free, memory.used
        except _UNAVAILABLE:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self._handle)
            return memory.total, memory.free, memory.used  # drivers before 510 count their reserve as used

    @_driver_errors()
    def memory_of_processes(self) -> dict[int, int | None] | None:
        """Return bytes by process id, or None when the driver lists no usable ids."""
        if in_container():  # the driver lists process ids of the host
            return None
        # bytes are unknown, or 0, on Windows and WSL
        bytes_by_pid: dict[int, int | None] = {}
        for query in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetGraphicsRunningProcesses):
            processes = _value_or_none(query, self._handle)
            if processes is None:
                return None
            # a process with both kinds of contexts is in both lists, each time with its full size
            bytes_by_pid.update({process.pid: process.usedGpuMemory or None for process in processes})
        return bytes_by_pid

    @_driver_errors()
    def temperature_c(self) -> float:
        return pynvml.nvmlDeviceGetTemperature(self._handle, pynvml.NVML_TEMPERATURE_GPU)

    @_driver_errors()
    def power_w(self) -> float:
        return pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1000

    @_driver_errors()
    def utilisation(self) -> float:
        return pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100


def _read_device(handle: Any, index: str) -> Device:
    device = OpenDevice(handle)
    total, free, _ = device.memory()
    generation = _value_or_none(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, handle)
    lanes = _value_or_none(pynvml.nvmlDeviceGetMaxPcieLinkWidth, handle)
    # one way at 80 % of the link's rate: PCIe 3 carries 0.985 GB/s per lane, each later generation twice as much
    pcie_bytes_s = 0.8 * lanes * 0.985e9 * 2.0 ** (generation - 3) if generation and lanes else None
    power_limit_w = None
    with contextlib.suppress(pynvml.NVMLError):  # not every GPU reports a limit
        power_limit_w = pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000
    return Device(
        name=pynvml.nvmlDeviceGetName(handle), total_bytes=total, free_bytes=free,
        capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        pcie_bytes_s=pcie_bytes_s, holders=_processes_using(device, total - free), index=index,
        uuid=pynvml.nvmlDeviceGetUUID(handle), driver=pynvml.nvmlSystemGetDriverVersion(), power_limit_w=power_limit_w,
    )  # fmt: skip


def _value_or_none(query: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return query(*arguments)
    except _UNAVAILABLE:
        return None


def _processes_using(device: OpenDevice, used_bytes: int) -> tuple[str, ...]:
    bytes_by_pid = device.memory_of_processes()
    if bytes_by_pid is None:
        hidden = ("programs that can't be named in a container or WSL",)
        return hidden if in_container() and used_bytes else ()
    ranked = sorted(bytes_by_pid.items(), key=lambda item: (-(item[1] or 0), item[0]))
    return tuple(f"{_process(pid)} {format_bytes(count) if count else '(bytes unknown)'}" for pid, count in ranked)


def _process(pid: int) -> str:
    try:
        return f"{psutil.Process(pid).name()} (pid {pid})"
    except psutil.Error:
        return f"pid {pid}"


def in_container() -> bool:
    """Return whether process ids differ from the machine's, as in a container or WSL."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) != FIRST_NAMESPACE
    except OSError:  # not Linux
        return False


def driver_message(error: Exception) -> str:
    """Format a driver error for the middle of a sentence."""
    return str(error).rstrip(".").lower()
