"""The rail beside every page, as HTML: mark, pages, the running job, and the memory of this machine's GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from finetune import __version__
from finetune.units import GIB

from ..language import LANGUAGES, current, mark, tr
from .markup import inert
from .words import minutes

MARK = (
    '<svg viewBox="0 0 22 22" aria-hidden="true"><rect class="ground" x="1" y="1" width="20" height="20" rx="5.5"/>'
    '<rect x="5" y="5.2" width="12" height="2.6" rx="1.3"/><rect x="5" y="9.7" width="8.2" height="2.6" rx="1.3"/>'
    '<rect x="5" y="14.2" width="4.8" height="2.6" rx="1.3"/></svg>'
)
_ICONS = {
    "runs": "M2 12.5 6 7l3 3 5-6.5",
    "models": "M8 1.8 13.5 5v6L8 14.2 2.5 11V5zM2.5 5 8 8.2 13.5 5M8 8.2v6", "settings": "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
}  # fmt: skip
#: Pages in the rail below the button for a new run: address and name.
PAGES = (("runs", mark("Runs")), ("models", mark("Models")), ("settings", mark("Settings")))
#: Pages that belong to one of the rail.
_BELONGS = {"run": "runs"}


@dataclass(frozen=True)
class RunningJob:
    """The run at work: its share of the steps and seconds left (None: not known yet)."""

    name: str
    share: float | None
    left_s: float | None


@dataclass(frozen=True)
class GpuMemory:
    """Memory of one GPU now, in bytes. `run_bytes`: of the run at work there; None where it is not measured."""

    name: str
    total_bytes: int
    free_bytes: int
    run_bytes: int | None = None

    @property
    def used_bytes(self) -> int:
        """What all programs take."""
        return max(0, self.total_bytes - self.free_bytes)


def rail(address: str) -> str:
    """Skip links, logo, the button for a new run, and the pages; `address` is the open page."""
    current = _BELONGS.get(address, address)
    pages = "".join(_link(target, name, current=target == current) for target, name in PAGES)
    to_start = f'<a class="ft-skip" href="#nr-go">{tr("Skip to Start training")}</a>' if not address else ""
    new = f'<i aria-hidden="true">+</i><span>{tr("New run")}</span>'
    return (
        f'<a class="ft-skip" href="#ft-main">{tr("Skip to the page")}</a>{to_start}<div class="ft-rail-pages">'
        f'<a class="ft-mark" href="/" aria-label="{tr("finetune, home")}">{MARK}<span>finetune</span></a>'
        f'<a class="ft-new" href="/"{_current(not address)} aria-label="{tr("New run")}">{new}</a>'
        f'<nav aria-label="{tr("Pages")}">{pages}</nav></div>'
    )


def status(job: RunningJob | None, gpus: Sequence[GpuMemory]) -> str:
    """The running job and the GPUs' memory, at the foot of the rail."""
    none = f'<div class="row"><b>{tr("No GPU here")}</b></div><p>{tr("Plan for one, or train on the CPU.")}</p>'
    shown = "".join(map(_gpu, gpus)) or none
    return f'<section class="ft-gauge" aria-label="{tr("This machine now")}">{_job(job) if job else ""}{shown}</section>'


def foot() -> str:
    """Theme, language and version."""
    theme = f'<button type="button" data-theme-switch aria-label="{tr("Light or dark")}">◐</button>'
    others = "".join(
        f'<button type="button" data-language="{code}" lang="{code}">{name}</button>'
        for code, name in LANGUAGES.items()
        if code != current()
    )
    return f'<div class="ft-rail-foot">{theme}{others}<span>{inert(__version__)}</span></div>'


def short_name(gpu_name: str) -> str:
    """A GPU's name without its maker's."""
    return gpu_name.removeprefix("NVIDIA ").removeprefix("GeForce ")


def _link(target: str, name: str, *, current: bool) -> str:
    icon = f'<svg viewBox="0 0 16 16" aria-hidden="true"><path d="{_ICONS[target]}"/></svg>'
    return f'<a href="/{target}"{_current(current)} aria-label="{inert(tr(name))}">{icon}<span>{inert(tr(name))}</span></a>'


def _current(current: bool) -> str:
    return ' aria-current="page"' if current else ""


def _job(job: RunningJob) -> str:
    share_text = tr("starting") if job.share is None else f"{job.share:.0%}"
    time_left = f"<p>{tr('{time} left', time=minutes(job.left_s))}</p>" if job.left_s is not None else ""
    bar = "" if job.share is None else _thin(("progress", job.share))
    link = f'<a class="row" href="/run?run={quote(job.name)}"><span>{inert(job.name)}</span><b>{share_text}</b></a>'
    return f"{link}{bar}{time_left}"


def _gpu(gpu: GpuMemory) -> str:
    used, total = f"{gpu.used_bytes / GIB:.1f}", f"{gpu.total_bytes / GIB:.1f}"
    others = gpu.used_bytes if gpu.run_bytes is None else max(0, gpu.used_bytes - gpu.run_bytes)
    run = 0 if gpu.run_bytes is None else min(gpu.run_bytes, gpu.used_bytes)
    owners = [tr("this run {gib}", gib=f"{run / GIB:.1f}")] if run else []
    owners.append(tr("others {gib}" if run else "in use {gib}", gib=f"{others / GIB:.1f}"))
    owners.append(tr("free {gib}", gib=f"{gpu.free_bytes / GIB:.1f}"))
    bar = _thin(("measured", run / gpu.total_bytes), ("others", others / gpu.total_bytes))
    return (
        f'<div class="row"><b>{inert(short_name(gpu.name))}</b>'
        f"<span>{tr('{used} of {total} GiB', used=used, total=total)}</span></div>{bar}<p>{' · '.join(owners)} GiB</p>"
    )


def _thin(*shares: tuple[str, float]) -> str:
    """A thin bar; the text beside it has the same numbers."""
    pieces = "".join(f'<i class="{css}" style="width:{100 * min(1.0, share):.1f}%"></i>' for css, share in shares)
    return f'<div class="ft-thin" aria-hidden="true">{pieces}</div>'
