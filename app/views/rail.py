"""Rail beside every page, as HTML: pages, running job, GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune import __version__
from finetune.units import GIB

from ..language import LANGUAGES, current, mark, tr
from .templates import render
from .words import minutes

#: Pages in the rail: address, name, path of the icon.
PAGES = (
    ("runs", mark("Runs"), "M2 12.5 6 7l3 3 5-6.5"),
    ("models", mark("Models"), "M8 1.8 13.5 5v6L8 14.2 2.5 11V5zM2.5 5 8 8.2 13.5 5M8 8.2v6"),
    ("settings", mark("Settings"), "M2.5 4.5h11M2.5 8h11M2.5 11.5h11"),
)
#: Rail page of pages outside the rail.
_BELONGS = {"run": "runs"}


@dataclass(frozen=True)
class RunningJob:
    """The running job; None for unknown values."""

    name: str
    share: float | None
    left_s: float | None


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU now, in bytes."""

    name: str
    total_bytes: int
    free_bytes: int
    #: None: not measured.
    run_bytes: int | None = None

    @property
    def used_bytes(self) -> int:
        return max(0, self.total_bytes - self.free_bytes)

    @property
    def of_run(self) -> int:
        return min(self.run_bytes or 0, self.used_bytes)

    @property
    def of_others(self) -> int:
        return max(0, self.used_bytes - (self.run_bytes or 0))


def rail(address: str) -> str:
    """Return logo, New run button, and pages; `address`: the open page."""
    pages = [(target, tr(name), path) for target, name, path in PAGES]
    return render("rail", address=address, current=_BELONGS.get(address, address), pages=pages)


def status(job: RunningJob | None, gpus: Sequence[GpuMemory]) -> str:
    """Return the running job and GPU memory."""
    return render(
        "rail_status", job=job, gpus=gpus, minutes=minutes, short_name=short_name, gib=lambda size: f"{size / GIB:.1f}"
    )


def foot() -> str:
    """Return theme, language and version."""
    languages = [(code, name) for code, name in LANGUAGES.items() if code != current()]
    return render("rail_foot", languages=languages, version=__version__)


def short_name(gpu_name: str) -> str:
    """Return a GPU's name without NVIDIA and GeForce."""
    return gpu_name.removeprefix("NVIDIA ").removeprefix("GeForce ")
