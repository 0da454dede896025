"""Head of a run's page as HTML: name, state, buttons, progress, next steps."""

from __future__ import annotations

import re
import time
from pathlib import Path
from urllib.parse import quote

from finetune.errors import DiskFull
from finetune.events import Checkpoint, OutOfMemory, Result, Retry, State
from finetune.run.out_of_memory import explanation_lines
from finetune.run.state import RunState

from ..language import mark, tr, tr_n
from ..live import Digest, LiveRun
from .markup import Safe, as_on_page, inert
from .templates import render
from .words import clock, in_words, loss_text, minutes, precision

#: Address and name of each tab.
TABS = {
    "overview": mark("Overview"), "samples": mark("Samples"), "evaluate": mark("Evaluate"), "chat": mark("Chat"),
    "export": mark("Export"), "settings": mark("Settings"), "log": mark("Log"),
}  # fmt: skip
#: Name and look of each state.
STATES = {
    "queued": (mark("In the queue"), "plain"), "starting": (mark("Starting"), "plain"), "running": (mark("Running"), "ok"),
    "pausing": (mark("Pausing"), "warn"), "paused": (mark("Paused"), "warn"),
    "finished": (mark("Finished"), "ok"), "diverged": (mark("Diverged"), "bad"), "failed": (mark("Failed"), "bad"),
    "lost": (mark("Process lost"), "bad"),
}  # fmt: skip
#: States whose reason replaces the figures on the page.
BROKEN = ("diverged", "failed", "lost")
_CURRENT = ' aria-current="page"'
#: Age in seconds from which values are called old.
_OLD_S = 5.0
#: Start of a message's command for the terminal.
_TYPED = re.compile(r"[;.,]? *(?:then )?[Rr]esume [^;]*?finetune resume|[;.,]? *[Tt]hen: +finetune")
#: Headings for out of memory outside training.
_OUT_OF_MEMORY = {
    "load": mark("Out of memory while the model was loading"), "evaluate": mark("Out of memory in an evaluation"),
    "save": mark("Out of memory while it was saving"),
}  # fmt: skip


def pill(state: RunState) -> str:
    """Return the state as a coloured word."""
    name, css = STATES.get(state.state, (state.state.capitalize(), "plain"))
    if state.exit_code == DiskFull.exit_code:
        name = mark("Paused, disk full")
    live = " live" if state.state in ("running", "starting", "pausing") else ""
    return f'<span class="ft-pill {css}{live}" data-state="{inert(state.state)}"><i></i>{inert(tr(name))}</span>'


def title(live: LiveRun, state: RunState) -> str:
    """Return name, state, buttons and facts."""
    return render(
        "run_title", name=live.run.path.name, pill=Safe(pill(state)), state=state.state,
        can_finish=not live.run.finish_request.exists(), resume=_resume_label(live), about=about(live),
    )  # fmt: skip


def about(live: LiveRun) -> list[str]:
    """Return model, data, method, GPU and start time."""
    plan, settings = live.plan(), live.plan().settings
    data = Path(str(settings.dataset.path)).name if settings.dataset.path else tr("the bundled data")
    if plan.data:
        data += f" · {tr_n('{n} row', '{n} rows', plan.data.rows)}"
    kind = tr("{precision} LoRA, rank {rank}", precision=precision(settings), rank=settings.lora_r)
    started = tr("started {time}", time=clock(live.run.plan.stat().st_mtime))
    where = tr("on the CPU") if plan.card.is_cpu else tr("on {gpu}", gpu=plan.card.name)
    return [Path(settings.model_name_or_path).name, data, kind, where, started]


def _resume_label(live: LiveRun) -> str:
    step = checkpoint_step(live)
    return tr("Resume from step {step}", step=f"{step:,}") if step else tr("Resume")


def checkpoint_step(live: LiveRun) -> int | None:
    """Return the step of the newest checkpoint on disk."""
    newest = live.digest.newest.get(Checkpoint.kind)
    if isinstance(newest, Checkpoint) and (live.run.checkpoints / f"checkpoint-{newest.step}").is_dir():
        return newest.step
    return None


def progress(live: LiveRun, state: RunState) -> str:
    """Return the finished steps and the time left."""
    digest, newest, settings = live.digest, live.digest.newest_step, live.plan().settings
    total = (newest.total_steps if newest else None) or live.plan().total_steps
    share = min(1.0, digest.step / total) if total else 0.0
    short = tr(STATES.get(state.state, (state.state, ""))[0])
    tab = f"{100 * share:.0f} % · {live.run.path.name}" if total and not state.ended else f"{short} · {live.run.path.name}"
    steps = tr(
        "<b>Step {step}</b> of {total}" if total else "<b>Step {step}</b>", step=f"{digest.step:,}", total=f"{total or 0:,}"
    )
    epoch, epochs = newest.epoch if newest else None, ""
    if epoch and not settings.max_steps:
        epochs = tr("epoch {epoch} of {all}", epoch=f"{epoch:.2f}", all=f"{settings.num_train_epochs:g}")
    if not digest.step and not state.ended:
        steps = inert(as_on_page(state.message).capitalize() or tr("Waiting for the first step"))
    return render(
        "run_progress", tab=tab, css=STATES.get(state.state, ("", ""))[1], total=total or 0, step=digest.step, share=share,
        steps=Safe(steps), epochs=epochs, age="" if state.ended else _age(digest), left=Safe(_left(digest, state)),
    )  # fmt: skip


def _left(digest: Digest, state: RunState) -> str:
    if state.ended:
        last = digest.newest.get(State.kind)
        return tr("ended {time}", time=clock(last.time_s)) if last is not None and last.time_s else ""
    if state.state == "pausing":
        return tr("a checkpoint is being written")
    left_s = digest.pace.left_s
    if left_s is None or not digest.step:
        return ""
    return tr("<b>{time} left</b>, ends about {clock}", time=minutes(left_s), clock=clock(time.time() + left_s))


def _age(digest: Digest) -> str:
    newest = digest.newest_step
    seconds = time.time() - newest.time_s if newest and newest.time_s else 0.0
    if seconds <= _OLD_S:
        return ""
    # in steps of 5 s, so that the text changes rarely
    return tr("values are {time} old", time=minutes(5 * (seconds // 5)))


def tabs(name: str, n_samples: int, current: str) -> str:
    """Return the tabs as links; `run.js` switches tabs without a page load."""
    links = "".join(
        f'<a href="/run?run={quote(name)}&amp;tab={tab}" data-tab="{tab}" data-key="tab-{tab}"'
        f"{_CURRENT if tab == current else ''}>"
        f"{tr(label)}{f'<i>{n_samples}</i>' if tab == 'samples' and n_samples else ''}</a>"
        for tab, label in TABS.items()
    )
    return f'<nav class="ft-tabs" aria-label="{tr("This run")}">{links}</nav>'


def survived(live: LiveRun) -> str:
    """Return the smaller plan after out of memory; empty otherwise."""
    retry, failed = live.digest.newest.get(Retry.kind), live.digest.newest.get(OutOfMemory.kind)
    if not isinstance(retry, Retry) or not isinstance(failed, OutOfMemory) or not retry.changes:
        return ""
    changes = in_words(" ".join(f"{name}={str(value).lower()}" for name, value in retry.changes.items()))
    happened = tr(_OUT_OF_MEMORY.get(failed.phase or "", mark("Out of memory in a step")))
    text = tr("Continued with a smaller plan: {changes}.", changes=changes)
    link = f'<a href="{_address(live, "log")}" data-tab="log">{tr("What happened")}</a>'
    return f'<div class="ft-now warn" role="status"><p><b>{inert(happened)}.</b> {inert(text)} {link}</p></div>'


def next_steps(live: LiveRun, state: RunState) -> str:
    """Return the result of an ended run, and its next steps."""
    if state.state == "paused":
        is_full = state.exit_code == DiskFull.exit_code
        why = tr("The disk is full: free some space first." if is_full else "The GPU is free.")
        why = why if is_full or not live.plan().card.is_cpu else ""
        step = checkpoint_step(live)
        where = tr("There is no checkpoint yet: it would begin anew.")
        if step:
            where = tr("Resume goes on from step {step}.", step=f"{step:,}")
        paused = tr("Paused at step {step}.", step=f"{live.digest.step:,}")
        return f'<div class="ft-now"><p><b>{paused}</b> {" ".join(filter(None, (why, where)))}</p></div>'
    if state.state != "finished":
        return ""
    result = live.digest.newest.get(Result.kind)
    text = f"<b>{tr('Done.')}</b>"
    if isinstance(result, Result):
        text = tr("<b>Step {step}</b> is the adapter's.", step=f"{result.step:,}")
        if result.eval_loss is not None:
            loss = loss_text(result.eval_loss)
            text = tr("<b>Best step {step}</b>, held-out loss {loss}.", step=f"{result.step:,}", loss=loss)
    links = "".join(
        f'<a class="ft-button{" primary" if tab == "evaluate" else ""}" href="{_address(live, tab)}" data-tab="{tab}">'
        f"{tr(TABS[tab])}</a>"
        for tab in ("evaluate", "chat", "export")
    )
    return f'<div class="ft-now"><p>{text}</p><div class="ft-acts">{links}</div></div>'


def failure(live: LiveRun, state: RunState) -> str:
    """Return a card with cause, step and remedies, instead of the figures."""
    is_float16 = live.plan().settings.dtype == "float16"
    half = f"{live.plan().settings.learning_rate / 2:.2g}" if state.state == "diverged" and not is_float16 else ""
    other = not half and (state.state == "diverged" or (state.state == "failed" and OutOfMemory.kind in live.digest.newest))
    return render(
        "run_failure", explanation=Safe(explanation_of(live, state)), half=half, other=other, resume=_resume_label(live),
        log=Safe(_address(live, "log")),
    )  # fmt: skip


def explanation_of(live: LiveRun, state: RunState) -> str:
    """Return the cause of a failure."""
    step, event = live.digest.step, live.digest.newest.get(OutOfMemory.kind)
    name, why = tr(STATES[state.state][0]), _reason(state.message)
    heading = tr("{state} at step {step}", state=name, step=f"{step:,}") if step else name
    if state.state == "failed" and isinstance(event, OutOfMemory):
        heading = tr("Out of memory at step {step}" if step else "Out of memory in the first step", step=f"{step + 1:,}")
        heading = tr(_OUT_OF_MEMORY[event.phase]) if event.phase in _OUT_OF_MEMORY else heading
        why = " ".join(map(as_on_page, explanation_lines(event)))
    if state.state == "diverged" and live.plan().settings.dtype != "float16":
        why += f" {tr('A lower learning rate is the usual remedy.')}"
    return f"<h2>{inert(heading)}</h2><p>{inert(why)}</p>"


def _address(live: LiveRun, tab: str) -> str:
    return f"/run?run={quote(live.run.path.name)}&amp;tab={tab}"


def _reason(message: str) -> str:
    # without the command for the terminal: the page has buttons
    text = as_on_page(_TYPED.split(message)[0].strip())
    if not text:
        return tr("It left no message.")
    sentence = f"{text[:1].upper()}{text[1:]}"
    return sentence if sentence.endswith((".", "?", "!", "。")) else tr("{sentence}.", sentence=sentence)
