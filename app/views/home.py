"""The first page as HTML: this machine, the run at work, the last runs, and how to start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from finetune.units import GIB

from ..language import mark, tr
from .markup import action, inert
from .rail import GpuMemory, RunningJob, short_name
from .run_head import pill
from .run_row import RunRow, link_to
from .words import minutes

NO_GPU = mark("No GPU here. Plan for one, or run the demo on the CPU.")


def machine(gpus: Sequence[GpuMemory]) -> str:
    """The title: what this machine has for training."""
    purpose = tr("Fine-tune a model with LoRA, on your machine. The memory is forecast before it starts.")
    if not gpus:
        text = tr(NO_GPU)
    elif len(gpus) == 1:
        text = tr("Good to go: {gpu}, {gib} GiB free", gpu=short_name(gpus[0].name), gib=f"{gpus[0].free_bytes / GIB:.1f}")
    else:
        free = tr(" and ").join(f"{gpu.free_bytes / GIB:.1f}" for gpu in gpus)
        text = tr("Good to go: {n} GPUs, {gib} GiB free", n=len(gpus), gib=free)
    return f'<h1 class="ft-title" data-title="{tr("Home")}">{inert(text)}</h1><p class="ft-note">{purpose}</p>'


def start(endings: Sequence[str]) -> str:
    """The ways to start: an own file, a dataset of the hub, the demo."""
    kinds = ", ".join(endings)
    return (
        f"<h2>{tr('Start with your data')}</h2>"
        f'<button type="button" class="ft-drop" data-pick="home-upload"><b>{tr("Drop a file here")}</b>'
        f"<span>{tr('or choose one: {kinds}', kinds=inert(kinds))}</span></button>"
        f'<form class="ft-pick" data-form="hub"><label for="home-hub">{tr("or a Hugging Face dataset")}</label>'
        '<input id="home-hub" name="value" placeholder="OWNER/NAME" maxlength="200" autocomplete="off">'
        f'<button class="ft-act">{tr("Use it")}</button></form>'
        f'<p class="ft-or">{tr("New here?")} <button type="button" class="ft-act" {action(demo=True)}>'
        f"{tr('Run the 3-minute demo')}</button>"
        f"<span>{tr('A small model on the CPU: needs no GPU and no download.')}</span></p>"
    )


def running(job: RunningJob | None, row: RunRow | None) -> str:
    """The run at work, with its share, time left, loss and curve; empty without one."""
    if job is None or row is None:
        return ""
    share = tr("starting") if job.share is None else f"{job.share:.0%}"
    left = tr("{time} left", time=minutes(job.left_s)) if job.left_s is not None else ""
    facts = [share, left, tr("loss {loss}", loss=row.loss) if row.loss else ""]
    width = 100 * (job.share or 0.0)
    return (
        f'<section class="ft-box ft-running" aria-label="{tr("The run at work")}"><div><b>{inert(job.name)}</b>'
        f"<p>{' · '.join(filter(None, facts))}</p></div>{row.curve}"
        f'<a class="ft-button" href="/run?run={quote(job.name)}">{tr("Open")}</a>'
        f'<div class="ft-line" aria-hidden="true"><i style="width:{width:.1f}%"></i></div></section>'
    )


def recent(rows: Sequence[RunRow], waiting: Sequence[Mapping[str, Any]]) -> str:
    """The newest runs, each with what it came to, after those that wait."""
    lines = [
        f"<li><span>{inert(status['message'])}</span><small>{tr('in the queue, {n}.', n=n)}</small></li>"
        for n, status in enumerate(waiting, 1)
    ]
    for row in rows:
        loss = tr("loss {loss}", loss=row.loss) if row.loss else row.started
        came_to = row.score or (tr("held out {loss}", loss=row.held_out) if row.held_out else loss)
        lines.append(f"<li><span>{link_to(row.name)}</span><small>{inert(came_to)}</small>{pill(row.state)}</li>")
    shown = (
        f"<ul>{''.join(lines)}</ul>"
        if lines
        else f'<p class="ft-note">{tr("Runs show here while they train, and stay when they are done.")}</p>'
    )
    head = f'<div class="ft-boxhead"><h2>{tr("Recent runs")}</h2><a href="/runs">{tr("All runs")}</a></div>'
    return f'{head}<div class="ft-lines">{shown}</div>'
