"""A run as HTML: head, tabs, and the parts that the browser follows; figures and memory measured beside forecast."""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Mapping
from pathlib import Path

from finetune.errors import DiskFull
from finetune.events import Checkpoint, Evaluation, OutOfMemory, Result, Retry, State
from finetune.planner.plan import AS_SET, Plan
from finetune.run.out_of_memory import explanation_lines
from finetune.run.state import RunState
from finetune.system import shell_join

from ..language import mark, tr, tr_n
from ..live import Digest, LiveRun, smoothed
from .answers import answers
from .charts import measured_peak
from .markup import Safe, as_on_page, chart_element, inert, note, render
from .words import STATES, clock, in_words, precision, state_name

#: Address and name of each tab.
TABS = {
    "overview": mark("Overview"), "answers": mark("Answers"), "chat": mark("Chat"), "use": mark("Use it"),
    "details": mark("Details"),
}  # fmt: skip
#: States whose reason replaces the figures on the page.
BROKEN = ("diverged", "failed", "lost")
#: Start of a message's command for the terminal.
_TYPED = re.compile(r"[;.,]? *(?:then )?[Rr]esume [^;]*?finetune resume|[;.,]? *[Tt]hen: +finetune")
#: Headings for out of memory outside training.
_OUT_OF_MEMORY = {
    "load": mark("Out of memory while loading the model"), "evaluate": mark("Out of memory during evaluation"),
    "save": mark("Out of memory while saving"),
}  # fmt: skip
_PROMPTS_SHOWN = 3
_STEPS_SHOWN = 3
#: Event kinds that are messages.
_KINDS = {
    "state": mark("state"), "start": mark("start"), "retry": mark("retry"), "warning": mark("warning"),
    "out_of_memory": mark("out of memory"),
}  # fmt: skip
LOG_BYTES = 16 * 2**10
#: Phases by their name in the events.
_PHASES = {"load": mark("Loading"), "train": mark("Training"), "evaluate": mark("Evaluating"), "save": mark("Saving")}
#: Parts of New run's bar that training does not take.
_NOT_TAKEN = ("spread", "free", "held")


def page(live: LiveRun, tab: str, forms: Mapping[str, str], parts: Mapping[str, str]) -> str:
    """Return the page of a run. `forms`: HTML of tabs with forms; `parts`: HTML of the head and of the open tab."""
    name, text = live.run.path.name, ""
    with contextlib.suppress(OSError):
        text = live.run.recipe.read_text(encoding="utf-8")
    return render(
        "run", name=name, tab=tab, parts=parts, forms={key: Safe(form) for key, form in forms.items()},
        chart=chart_element([name]), chosen=settings_table(live.plan()), recipe=Safe(inert(text, 100_000)),
        command=f"finetune run {shell_join([str(live.run.recipe)])}",
    )  # fmt: skip


def html_parts(live: LiveRun, tab: str) -> dict[str, str]:
    """Return the HTML of each part of the head, and of the open tab if it has no forms."""
    is_read = live.refresh()  # before the values below
    state, digest, plan = live.state(), live.digest, live.plan()
    reading = "" if is_read else note(tr("Reading this run's history: {share}", share=f"{live.progress:.0%}"))
    name = live.run.path.name
    shown = {
        "title": title(live, state),
        "progress": progress(live, state) + reading,
        "now": now(live, state),
        "tabs": render("run_tabs", run=name, tabs=TABS, open=tab),
    }
    if tab == "overview":
        shown["figures"] = failure(live, state) if state.state in BROKEN else figures(digest, plan)
        shown["memory"] = memory(digest, plan)
        shown["answers"] = render("run_answers", run=name, table=Safe(answers(digest.samples, _PROMPTS_SHOWN)))
    elif tab == "answers":
        none = note(tr("At each evaluation the model answers held-out prompts. The answers appear here side by side."))
        table = answers(digest.samples, most_steps=_STEPS_SHOWN)
        shown["samples"] = f"<h2>{tr('Answers as it learns')}</h2>{table or none}"
    elif tab == "details":
        shown["messages"] = f"<h2>{tr('Messages')}</h2>{messages(digest)}"
        shown["log"] = render("log", text=Safe(inert(log_tail(live), LOG_BYTES)))
    return shown


def title(live: LiveRun, state: RunState) -> str:
    """Return name, state, buttons and facts."""
    return render(
        "run_title", name=live.run.path.name, pill=pill(state), state=state.state,
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
    return render(
        "run_progress", live=live, digest=live.digest, settings=live.plan().settings, state=state, name=state_name(state.state),
        css=STATES.get(state.state, ("", ""))[1], now_s=time.time(), ended=live.digest.newest.get(State.kind),
    )  # fmt: skip


def now(live: LiveRun, state: RunState) -> str:
    """Return the smaller plan after out of memory, and the result of an ended run with its next steps."""
    retry, failed, result = (live.digest.newest.get(kind) for kind in (Retry.kind, OutOfMemory.kind, Result.kind))
    changes = retry.changes if isinstance(retry, Retry) and isinstance(failed, OutOfMemory) else {}
    phase = failed.phase or "" if isinstance(failed, OutOfMemory) else ""
    return render(
        "run_now", run=live.run.path.name, state=state.state, step=live.digest.step, resumed_step=checkpoint_step(live),
        changes=in_words(" ".join(f"{name}={str(value).lower()}" for name, value in changes.items())) if changes else "",
        happened=tr(_OUT_OF_MEMORY.get(phase, mark("Out of memory during a step"))), tabs=TABS,
        is_full=state.exit_code == DiskFull.exit_code, is_cpu=live.plan().card.is_cpu, result=result,
    )  # fmt: skip


def failure(live: LiveRun, state: RunState) -> str:
    """Return a card with cause, step and remedies, instead of the figures."""
    settings = live.plan().settings
    rate = f"{settings.learning_rate / 2:.2g}" if state.state == "diverged" and settings.dtype != "float16" else ""
    is_too_big = state.state == "failed" and OutOfMemory.kind in live.digest.newest
    return render(
        "run_failure", explanation=explanation_of(live, state), half=rate, resume=_resume_label(live), run=live.run.path.name,
        step=live.digest.step, other=not rate and (state.state == "diverged" or is_too_big),
    )  # fmt: skip


def explanation_of(live: LiveRun, state: RunState) -> Safe:
    """Return the cause of a failure."""
    step, event = live.digest.step, live.digest.newest.get(OutOfMemory.kind)
    name, why = state_name(state.state), _reason(state.message)
    heading = tr("{state} at step {step}", state=name, step=f"{step:,}") if step else name
    if state.state == "failed" and isinstance(event, OutOfMemory):
        heading = tr("Out of memory at step {step}" if step else "Out of memory in the first step", step=f"{step + 1:,}")
        heading = tr(_OUT_OF_MEMORY[event.phase]) if event.phase in _OUT_OF_MEMORY else heading
        why = _explained(event)
    if state.state == "diverged" and live.plan().settings.dtype != "float16":
        why += f" {tr('A lower learning rate usually helps.')}"
    return Safe(f"<h2>{inert(heading)}</h2><p>{inert(why)}</p>")


def _reason(message: str) -> str:
    # without the command for the terminal: the page has buttons
    text = as_on_page(_TYPED.split(message)[0].strip())
    if not text:
        return tr("It left no message.")
    sentence = f"{text[:1].upper()}{text[1:]}"
    return sentence if sentence.endswith((".", "?", "!", "。")) else tr("{sentence}.", sentence=sentence)


def figures(digest: Digest, plan: Plan) -> str:
    """Return loss, held-out loss, peak, speed and GPU, each beside a reference."""
    loss, held_out = digest.series.get("loss"), digest.series.get("eval_loss")
    # the newest step may have no value
    smooth = smoothed(loss.points()) if loss else []
    evaluation, step = digest.newest.get(Evaluation.kind), digest.newest_step
    rate = step.tokens_per_s if step else None
    clauses, values = digest.pace.step_time_clauses(plan)
    return render(
        "figures", loss=loss, average=next((value for _, value in reversed(smooth) if value is not None), None),
        held_out=held_out if held_out and held_out.last is not None else None,
        held_out_step=evaluation.step if isinstance(evaluation, Evaluation) else held_out and held_out.last_step,
        lowest=min(((part.low, part.low_step) for part in held_out.bins.values() if part.count), default=None)
        if held_out else None,
        measured=measured_peak(digest, plan), forecast=plan.forecast, is_cpu=plan.card.is_cpu, step=step,
        rate=rate if rate is not None and math.isfinite(rate) else None, percent=_percent,
        step_time=as_on_page(" ".join(tr(clause, **values) for clause in clauses)),
    )  # fmt: skip


def _percent(measured: float, forecast: float) -> str:
    off = round(100 * (measured / forecast - 1), 1)
    return f"{'−' if off < 0 else '+' if off else ''}{abs(off):.1f} %"


def memory(digest: Digest, plan: Plan) -> str:
    """Return the measured memory beside the forecast, by phase and part."""
    forecast, measured = plan.forecast, measured_peak(digest, plan)
    # name, forecast and measured bytes; None if unknown
    pairs = [(tr("Process"), forecast.peak_bytes if forecast else None, measured)]
    if not plan.card.is_cpu:
        pairs += [
            (tr(name), forecast.of_phase(phase).allocated_bytes if forecast else None, digest.phases[phase])
            for phase, name in _PHASES.items() if phase in digest.phases
        ]  # fmt: skip
    pairs = [pair for pair in pairs if pair[1:] != (None, None)]
    # 6 % of space right of the longest bar
    scale = 1.06 * max([1, *(size or 0 for pair in pairs for size in pair[1:])])
    parts = {name: size for name, size in parts_of(plan)[0].items() if name not in _NOT_TAKEN} if forecast else {}
    return render(
        "memory", plan=plan, measured=measured, pairs=pairs, parts=parts, share=lambda size: f"{100 * size / scale:.2f}%",
        percent=_percent,
    )  # fmt: skip


def parts_of(plan: Plan) -> tuple[dict[str, int], int]:
    """Return the bytes of the parts, which sum to the GPU's memory, and the excess bytes; memory_parts.html names the parts."""
    forecast, total = plan.forecast, plan.card.total_bytes
    assert forecast is not None

    def of(*names: str) -> int:
        return sum(forecast.parts.get(name, 0) for name in names)

    parts = {
        "weights": of("weights"), "gathered": of("gathered"), "adapters": of("adapters", "gradients", "optimizer"),
        "activations": of("activations", "recomputed"), "loss": of("loss", "workspace"),
        # the CUDA context, and memory that the allocator holds
        "overhead": max(0, forecast.peak_bytes - forecast.allocated_bytes),
        # the plan must fit with the whole margin
        "spread": max(0, forecast.peak_high_bytes - forecast.peak_bytes),
    }  # fmt: skip
    used, budget = sum(parts.values()), min(plan.usable_bytes, total)
    parts |= {"free": max(0, budget - used), "held": total - budget}
    return {key: size for key, size in parts.items() if size > 0}, max(0, used - budget)


def settings_table(plan: Plan) -> Safe:
    """Return the HTML of the main settings with their reasons, then of all settings."""
    return render("choices", plan=plan, settings=plan.settings, as_set=AS_SET)


def messages(digest: Digest) -> Safe:
    """Return states, retries and warnings."""
    return render(
        "messages", events=list(reversed(digest.messages)), kinds=_KINDS, explained=_explained,
        hour=lambda event: time.strftime("%H:%M:%S", time.localtime(event.time_s or 0)),
    )  # fmt: skip


def _explained(event: OutOfMemory) -> str:
    return " ".join(map(as_on_page, explanation_lines(event)))


def pill(state: RunState) -> Safe:
    """Return the state as a coloured word."""
    name, css = STATES.get(state.state, (state.state.capitalize(), "plain"))
    if state.exit_code == DiskFull.exit_code:
        name = mark("Paused, disk full")
    live = " live" if state.state in ("running", "starting", "pausing") else ""
    return Safe(f'<span class="ft-pill {css}{live}" data-state="{inert(state.state)}"><i></i>{inert(tr(name))}</span>')


def log_tail(live: LiveRun) -> str:
    """Return the end of log.txt."""
    try:
        with live.run.log.open("rb") as file:
            file.seek(max(0, live.run.log.stat().st_size - LOG_BYTES))
            return file.read(LOG_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
