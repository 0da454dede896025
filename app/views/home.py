"""The first page as HTML: this machine, the run at work, the last runs, and how to start."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from finetune.units import GIB

from .markup import inert
from .rail import GpuMemory, RunningJob, short_name
from .run_head import pill
from .run_row import RunRow, link_to
from .words import minutes

NO_GPU = "No GPU here. Plan for one, or run the demo on the CPU."


def machine(gpus: Sequence[GpuMemory]) -> str:
    """The title: what this machine has for training."""
    purpose = "Fine-tune a model with LoRA, on your machine. The memory is forecast before it starts."
    if not gpus:
        text = NO_GPU
    elif len(gpus) == 1:
        text = f"Good to go: {short_name(gpus[0].name)}, {gpus[0].free_bytes / GIB:.1f} GiB free"
    else:
        free = " and ".join(f"{gpu.free_bytes / GIB:.1f}" for gpu in gpus)
        text = f"Good to go: {len(gpus)} GPUs, {free} GiB free"
    return f'<h1 class="ft-title" data-title="Home">{inert(text)}</h1><p class="ft-note">{purpose}</p>'


def start(endings: Sequence[str]) -> str:
    """The ways to start: an own file, a dataset of the hub, the demo."""
    kinds = ", ".join(endings)
    return (
        f'<h2>Start with your data</h2><button type="button" class="ft-drop" data-pick="home-upload"><b>Drop a file here</b>'
        f"<span>or choose one: {inert(kinds)}</span></button>"
        '<form class="ft-pick" data-form="hub"><label for="home-hub">or a Hugging Face dataset</label>'
        '<input id="home-hub" name="value" placeholder="OWNER/NAME" maxlength="200" autocomplete="off">'
        '<button class="ft-act">Use it</button></form>'
        f'<p class="ft-or">New here? <button type="button" class="ft-act" data-act="{inert(json.dumps({"demo": True}))}">'
        "Run the 3-minute demo</button><span>A small model on the CPU: needs no GPU and no download.</span></p>"
    )


def running(job: RunningJob | None, row: RunRow | None) -> str:
    """The run at work, with its share, time left, loss and curve; empty without one."""
    if job is None or row is None:
        return ""
    share = "starting" if job.share is None else f"{job.share:.0%}"
    facts = [share, f"{minutes(job.left_s)} left" if job.left_s is not None else "", f"loss {row.loss}" if row.loss else ""]
    width = 100 * (job.share or 0.0)
    return (
        f'<section class="ft-box ft-running" aria-label="The run at work"><div><b>{inert(job.name)}</b>'
        f"<p>{' · '.join(filter(None, facts))}</p></div>{row.curve}"
        f'<a class="ft-button" href="/run?run={quote(job.name)}">Open</a>'
        f'<div class="ft-line" aria-hidden="true"><i style="width:{width:.1f}%"></i></div></section>'
    )


def recent(rows: Sequence[RunRow], waiting: Sequence[Mapping[str, Any]]) -> str:
    """The newest runs, each with what it came to, after those that wait."""
    lines = [
        f"<li><span>{inert(status['message'])}</span><small>in the queue, {n}.</small></li>"
        for n, status in enumerate(waiting, 1)
    ]
    for row in rows:
        came_to = row.score or (f"held out {row.held_out}" if row.held_out else f"loss {row.loss}" if row.loss else row.started)
        lines.append(f"<li><span>{link_to(row.name)}</span><small>{inert(came_to)}</small>{pill(row.state)}</li>")
    shown = (
        f"<ul>{''.join(lines)}</ul>"
        if lines
        else '<p class="ft-note">Runs show here while they train, and stay when they are done.</p>'
    )
    return f'<div class="ft-boxhead"><h2>Recent runs</h2><a href="/runs">All runs</a></div><div class="ft-lines">{shown}</div>'
