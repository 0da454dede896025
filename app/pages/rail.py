"""Rail beside every page: pages, running job, GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from finetune import __version__
from finetune.card.visible import usable_devices
from finetune.errors import FinetuneError
from finetune.run.state import is_alive
from finetune.units import GIB

from ..language import LANGUAGES, current, mark, tr
from ..live import LiveRun
from ..views.markup import render
from ..views.words import minutes, short_name
from ..web.followed import FollowedPage

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
        return min(max(0, self.run_bytes or 0), self.used_bytes)

    @property
    def of_others(self) -> int:
        return self.used_bytes - self.of_run


class Rail(FollowedPage):
    """Running job and GPU memory."""

    name, part_names, every_ms = "rail", ("now",), 3000

    def parts(self) -> dict[str, str]:
        try:
            live = self._live()
            return {"now": status(_job(live) if live else None, gpu_memory(live))}
        except (FinetuneError, OSError, ValueError):  # a damaged run
            return {"now": status(None, gpu_memory(None))}

    def _live(self) -> LiveRun | None:
        run = next((run for run in self.context.workspace.list_runs() if is_alive(run)), None)
        if run is None:
            return None
        live = self.context.lives.of(run)
        live.refresh()
        return live


def _job(live: LiveRun) -> RunningJob:
    newest = live.digest.newest_step
    total = (newest.total_steps if newest else None) or live.plan().total_steps
    share, left_s = min(1.0, live.digest.step / total) if live.digest.step and total else None, live.digest.pace.left_s
    return RunningJob(live.run.path.name, share, left_s)


def gpu_memory(live: LiveRun | None) -> list[GpuMemory]:
    """Return the memory of the usable GPUs."""
    step = live.digest.newest_step if live else None
    own = {live.plan().card.uuid: step.own_card_bytes} if live and step else {}
    return [GpuMemory(card.name, card.total_bytes, card.free_bytes, own.get(card.uuid)) for card in usable_devices()]


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
