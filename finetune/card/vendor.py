"""What the program asks of a vendor's GPUs; each vendor answers in a module of its own, listed in vendors.py."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

#: The PID namespace that every Linux machine starts with (include/linux/proc_ns.h); another one is a container's, or WSL's.
FIRST_NAMESPACE = "pid:[4026531836]"
WHEEL_FIX = (
    "Install the wheel for your card: uv pip install --reinstall --torch-backend=auto torch, or choose one at "
    "https://pytorch.org/get-started/locally/"
)


class DriverError(Exception):
    """The driver is missing, or does not answer. `was_updated`: it no longer fits its library until the machine restarts."""

    def __init__(self, message: str, *, was_updated: bool = False) -> None:
        super().__init__(message)
        self.was_updated = was_updated


@dataclass(frozen=True)
class Device:
    """One GPU, or one instance of a split GPU, as the driver reports it.

    `total_bytes`: without the driver's reserve, as torch sees it. `holders`: processes that use its memory, as text. `index`:
    as the driver counts, `0:1` for an instance. `speed`: cores x MHz, which orders GPUs; 0 when unknown.
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
        """Whether it is a part of a split GPU (MIG)."""
        return ":" in self.index


@dataclass(frozen=True)
class LostCard:
    """A GPU that the driver lists and can't describe; `why` in the driver's words."""

    index: str
    why: str


@dataclass(frozen=True)
class Build:
    """The installed torch: its version and what it is built for; `cuda` and `hip` are None without it."""

    version: str
    cuda: str | None
    hip: str | None = None

    @property
    def platform(self) -> str:
        """What it is built for: `CUDA 13.0`, `ROCm 7.1`; empty for a CPU-only build."""
        return f"ROCm {self.hip}" if self.hip else f"CUDA {self.cuda}" if self.cuda else ""


#: The driver's version, and the newest version (major, minor) of the vendor's platform that it runs.
Driver = tuple[str, tuple[int, int]]


class OpenDevice(Protocol):
    """A GPU that is asked again and again while a run uses it. Each method raises DriverError."""

    def memory(self) -> tuple[int, int, int]:
        """Bytes: total less the driver's reserve, free, and used by processes."""

    def memory_of_processes(self) -> dict[int, int | None] | None:
        """Bytes by process id, None bytes where unknown; None when the ids can't be read from here."""

    def temperature_c(self) -> float:
        """Degrees Celsius."""

    def power_w(self) -> float:
        """Watts."""


class Vendor(Protocol):
    """One vendor's answers. Methods that ask the driver raise DriverError."""

    name: ClassVar[str]
    #: The platform of the builds of torch that are tested on it, as Build.platform begins.
    platform: ClassVar[str]
    #: Words in the names of its GPUs that people leave out.
    product_lines: ClassVar[tuple[str, ...]]
    #: The vendor's number in /sys/bus/pci/devices/*/vendor.
    pci_id: ClassVar[str]
    #: The variable that lists the GPUs that a process may use, and with which value it sees none.
    visible_variable: ClassVar[str]
    sees_none: ClassVar[str]
    #: The variable, and its value, with which a process counts GPUs as the driver does.
    driver_order: ClassVar[tuple[str, str]]
    #: How the ids of GPUs, and of their instances, begin.
    uuid_prefixes: ClassVar[tuple[str, ...]]
    #: What can be done where a container does not see the GPU, and where the machine lacks the driver.
    container_fix: ClassVar[str]
    driver_fix: ClassVar[str]
    #: What to do about a GPU that does not answer its driver.
    lost_fix: ClassVar[str]
    #: What a container of Kubernetes asks for.
    kubernetes_resource: ClassVar[str]

    def read_devices(self) -> tuple[tuple[Device, ...], tuple[LostCard, ...]]:
        """Every GPU that the driver sees, visible to this process or not, and those that don't answer."""

    def driver_versions(self) -> Driver:
        """The driver's version and the newest platform it runs."""

    def open_device(self, uuid: str) -> OpenDevice:
        """A GPU by its UUID."""

    def build_problem(self, build: Build, driver: Driver | None) -> tuple[str, str] | None:
        """Why this torch can't use any of the vendor's GPUs with this driver, and the fix; else None."""

    def capability_problem(self, build: Build, name: str, capability: tuple[int, int] | None) -> tuple[str, str] | None:
        """Why this torch has no kernels for a GPU as old as this one, and the fix; None when it may have."""

    def has_kernels(self, capability: tuple[int, int], architectures: list[str]) -> bool:
        """Whether a torch built for `architectures` (torch.cuda.get_arch_list) has code for a GPU of this capability, as torch
        reports it."""

    def supports_bf16(self, capability: tuple[int, int] | None) -> bool:
        """Whether matrix products in bf16 are fast. `capability`: NVIDIA's; None: unknown, or of another vendor."""

    def supports_expandable_segments(self, *, windows_driver: bool) -> bool:
        """Whether torch's allocator may use expandable segments."""


def in_container() -> bool:
    """Whether process ids here are not the machine's own, as in a container or under WSL."""
    try:
        return str(Path("/proc/self/ns/pid").readlink()) != FIRST_NAMESPACE
    except OSError:  # not Linux
        return False


def driver_message(error: Exception) -> str:
    """The message of a driver error, for the middle of a sentence."""
    return str(error).rstrip(".").lower()
