"""Whether the installed torch can use a card that the driver shows: its build, the driver's CUDA, the card's age."""

from __future__ import annotations

from dataclasses import dataclass

#: Oldest driver of each CUDA: any of its minor versions runs on it (CUDA toolkit release notes, table "minimum required driver
#: version for CUDA minor version compatibility"). Wheels of torch from PyPI are built for CUDA 13 from 2.11 on.
OLDEST_DRIVER = {12: "525", 13: "580"}
#: Oldest compute capability of each CUDA (release notes of CUDA 13.0: Maxwell, Pascal and Volta are no longer supported).
OLDEST_CAPABILITY = {13: (7, 5)}
WHEEL_FIX = (
    "Install the wheel for your card: uv pip install --reinstall --torch-backend=auto torch, or choose one at "
    "https://pytorch.org/get-started/locally/"
)


@dataclass(frozen=True)
class Build:
    """The installed torch: its version and what it is built for; `cuda` and `hip` are None without it."""

    version: str
    cuda: str | None
    hip: str | None = None


def torch_build() -> Build:
    """The torch that a run will import."""
    import torch

    return Build(torch.__version__, torch.version.cuda, torch.version.hip)


def problem_of(build: Build, driver: tuple[str, tuple[int, int]] | None) -> tuple[str, str] | None:
    """Why this torch can't use any NVIDIA card with this driver (its version, its newest CUDA), and the fix; else None."""
    if build.hip:
        return f"torch {build.version} is built for AMD cards (ROCm)", WHEEL_FIX
    if build.cuda is None:
        return f"torch {build.version} is a CPU-only build; the card is not used", WHEEL_FIX
    major = int(build.cuda.split(".")[0])
    if driver is None or major <= driver[1][0]:
        return None
    newest, oldest = f"{driver[1][0]}.{driver[1][1]}", OLDEST_DRIVER.get(major)
    update = f"Update the driver{f' to {oldest} or newer' if oldest else ''}"
    return (
        f"torch {build.version} is built for CUDA {build.cuda}, driver {driver[0]} supports CUDA up to {newest}",
        f"{update}, or install an older wheel. {WHEEL_FIX}",
    )


def problem_of_card(build: Build, name: str, capability: tuple[int, int] | None) -> tuple[str, str] | None:
    """Why this torch has nothing for a card as old as this one, and the fix; None when it may have."""
    if build.cuda is None or capability is None:
        return None
    oldest = OLDEST_CAPABILITY.get(int(build.cuda.split(".")[0]), (0, 0))
    if capability >= oldest:
        return None
    return (
        f"{name} has compute capability {capability[0]}.{capability[1]}, CUDA {build.cuda} of torch {build.version} needs "
        f"{oldest[0]}.{oldest[1]} or later",
        "Wheels for CUDA 12.6 still have kernels for it: pip install torch --index-url https://download.pytorch.org/whl/cu126",
    )
