"""The torch that a run will import, and whether it can use a GPU that the driver shows."""

from __future__ import annotations

from finetune.card.vendor import Build, Driver
from finetune.card.vendors import current_vendor


def torch_build() -> Build:
    """The torch that a run will import."""
    import torch

    return Build(torch.__version__, torch.version.cuda, torch.version.hip)


def problem_of_torch(name: str, capability: tuple[int, int] | None, driver: Driver | None) -> tuple[str, str] | None:
    """Why the installed torch can't use this GPU with this driver, and the fix; else None."""
    build, vendor = torch_build(), current_vendor()
    return vendor.build_problem(build, driver) or vendor.capability_problem(build, name, capability)
