"""The rail beside every page, as HTML: mark, pages, the running job, and the memory of this machine's GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from finetune import __version__
from finetune.units import GIB, format_seconds

from .markup import inert

MARK = (
    '<svg viewBox="0 0 22 22" aria-hidden="true"><rect class="ground" x="1" y="1" width="20" height="20" rx="5.5"/>'
    '<rect x="5" y="5.2" width="12" height="2.6" rx="1.3"/><rect x="5" y="9.7" width="8.2" height="2.6" rx="1.3"/>'
    '<rect x="5" y="14.2" width="4.8" height="2.6" rx="1.3"/></svg>'
)
_ICONS = {
    "runs": "M2 12.5 6 7l3 3 5-6.5", "try": "M2.5 3.5h11v7.5h-6l-3 2.5v-2.5h-2z",
}  # fmt: skip
#: Pages in the rail: address and name. Those of a new run are the steps behind its button.
PAGES = (("runs", "Runs"), ("try", "Chat"))
#: Pages that belong to one of the rail.
_BELONGS = {"run": "runs"}
#: Steps of a new run: address, name and what is chosen there.
STEPS = (("", "Model & data", "what learns from what"), ("fit", "Fit", "how it uses the GPU"))
NEW_RUN = tuple(address for address, _, _ in STEPS)


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
    """Skip link, mark, the button for a new run, and the pages; `address` is the one that is open."""
    current = _BELONGS.get(address, address)
    pages = "".join(_link(target, name, current=target == current) for target, name in PAGES)
    new = '<i aria-hidden="true">+</i><span>New run</span>'
    return (
        '<a class="ft-skip" href="#ft-main">Skip to the page</a><div class="ft-rail-pages">'
        f'<a class="ft-mark" href="/" aria-label="finetune, new run">{MARK}<span>finetune</span></a>'
        f'<a class="ft-new" href="/"{_current(address in NEW_RUN)} aria-label="New run">{new}</a>'
        f'<nav aria-label="Pages">{pages}</nav></div>'
    )


def steps(address: str) -> str:
    """The two steps of a new run, as links."""
    links = "".join(
        f'<a href="/{target}"{_current(target == address)}><i aria-hidden="true">{number}</i><span><b>{inert(name)}</b>'
        f"<small>{inert(purpose)}</small></span></a>"
        for number, (target, name, purpose) in enumerate(STEPS, 1)
    )
    return f'<nav class="ft-steps" aria-label="New run">{links}</nav>'


def status(job: RunningJob | None, gpus: Sequence[GpuMemory]) -> str:
    """What runs now and what it takes, at the foot of the rail."""
    shown = "".join(map(_gpu, gpus)) or '<div class="row"><b>No GPU here</b></div><p>Plan for one, or train on the CPU.</p>'
    return f'<section class="ft-gauge" aria-label="This machine now">{_job(job) if job else ""}{shown}</section>'


def foot() -> str:
    """Theme and version."""
    theme = '<button type="button" data-theme-switch aria-label="Light or dark">◐</button>'
    return f'<div class="ft-rail-foot">{theme}<span>{inert(__version__)}</span></div>'


def _link(target: str, name: str, *, current: bool) -> str:
    icon = f'<svg viewBox="0 0 16 16" aria-hidden="true"><path d="{_ICONS[target]}"/></svg>'
    return f'<a href="/{target}"{_current(current)} aria-label="{inert(name)}">{icon}<span>{inert(name)}</span></a>'


def _current(current: bool) -> str:
    return ' aria-current="page"' if current else ""


def _job(job: RunningJob) -> str:
    share = "starting" if job.share is None else f"{job.share:.0%}"
    left = f"<p>{format_seconds(job.left_s)} left</p>" if job.left_s is not None else ""
    bar = "" if job.share is None else _thin(("progress", job.share))
    link = f'<a class="row" href="/run?run={quote(job.name)}"><span>{inert(job.name)}</span><b>{share}</b></a>'
    return f"{link}{bar}{left}"


def _gpu(gpu: GpuMemory) -> str:
    used, total = f"{gpu.used_bytes / GIB:.1f}", f"{gpu.total_bytes / GIB:.1f}"
    others = gpu.used_bytes if gpu.run_bytes is None else max(0, gpu.used_bytes - gpu.run_bytes)
    run = 0 if gpu.run_bytes is None else min(gpu.run_bytes, gpu.used_bytes)
    owners = [f"this run {run / GIB:.1f}"] if run else []
    owners += [f"{'others' if run else 'in use'} {others / GIB:.1f}", f"free {gpu.free_bytes / GIB:.1f}"]
    bar = _thin(("measured", run / gpu.total_bytes), ("others", others / gpu.total_bytes))
    return (
        f'<div class="row"><b>{inert(gpu.name.removeprefix("NVIDIA ").removeprefix("GeForce "))}</b>'
        f"<span>{used} of {total} GiB</span></div>{bar}<p>{' · '.join(owners)} GiB</p>"
    )


def _thin(*shares: tuple[str, float]) -> str:
    """A thin bar; the text beside it has the same numbers."""
    pieces = "".join(f'<i class="{css}" style="width:{100 * min(1.0, share):.1f}%"></i>' for css, share in shares)
    return f'<div class="ft-thin" aria-hidden="true">{pieces}</div>'
