"""A run as HTML: head, tabs, and refreshed parts; figures and memory measured beside forecast."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping
from pathlib import Path

from finetune.errors import DiskFull
from finetune.events import Evaluation, OutOfMemory, Result, Retry, State
from finetune.planner.plan import AS_SET, Plan
from finetune.run.retry import explanation
from finetune.run.state import RunState
from finetune.system import shell_join

from ..language import mark, tr, tr_n
from ..live import Digest, LiveRun, smoothed
from .answers import answers
from .charts import measured_peak
from .markup import Safe, chart_element, inert, note, render
from .words import STATES, clock, in_words, precision, state_name

#: Address and name of each tab.
TABS = mark({"overview": "Overview", "answers": "Answers", "chat": "Chat", "use": "Use it", "details": "Details"})
BROKEN = ("diverged", "failed", "lost")  # the reason of the failure replaces the figures
_PROMPTS_SHOWN = 3
_STEPS_SHOWN = 3
_MESSAGE_KIND_NAMES = mark({
    "state": "state", "start": "start", "retry": "retry", "warning": "warning", "out_of_memory": "out of memory",
})  # fmt: skip
LOG_BYTES = 16 * 2**10
_PHASE_NAMES = mark({"load": "Loading", "train": "Training", "evaluate": "Evaluating", "save": "Saving"})
_NOT_OF_TRAINING = ("spread", "free", "held")  # parts of the memory bar that training does not use


def page(live: LiveRun, tab: str, forms: Mapping[str, str], parts: Mapping[str, str]) -> str:
    """Return a run's page. `forms`: HTML of tabs with forms; `parts`: HTML of head and open tab."""
    name, recipe = live.run.path.name, ""
    with contextlib.suppress(OSError):
        recipe = live.run.recipe.read_text(encoding="utf-8")
    return render(
        "run", name=name, tab=tab, parts=parts, forms={key: Safe(form) for key, form in forms.items()},
        chart=chart_element([name]), chosen=settings_table(live.plan()), recipe=Safe(inert(recipe, 100_000)),
        command=f"finetune run {shell_join([str(live.run.recipe)])}",
    )  # fmt: skip


def html_parts(live: LiveRun, tab: str) -> dict[str, str]:
    """Return the HTML of each part of the head and the open tab."""
    has_read_all = live.refresh()  # before the values below
    state, digest, plan = live.state(), live.digest, live.plan()
    reading = "" if has_read_all else note(tr("Reading this run's history: {share}", share=f"{live.read_share:.0%}"))
    name = live.run.path.name
    parts = {
        "title": title(live, state),
        "progress": progress(live, state) + reading,
        "now": now(live, state),
        "tabs": render("run_tabs", run=name, tabs=TABS, open=tab),
    }
    if tab == "overview":
        parts["figures"] = failure(live, state) if state.state in BROKEN else figures(digest, plan)
        parts["memory"] = memory(digest, plan)
        parts["answers"] = render("run_answers", run=name, table=Safe(answers(digest.samples, _PROMPTS_SHOWN)))
    elif tab == "answers":
        no_samples = note(tr("At each evaluation the model answers held-out prompts. The answers appear here side by side."))
        table = answers(digest.samples, most_steps=_STEPS_SHOWN)
        parts["samples"] = f"<h2>{tr('Answers as it learns')}</h2>{table or no_samples}"
    elif tab == "details":
        parts["messages"] = f"<h2>{tr('Messages')}</h2>{messages(digest)}"
        parts["log"] = render("log", text=Safe(inert(_log_tail(live), LOG_BYTES)))
    return parts


def title(live: LiveRun, state: RunState) -> str:
    """Return name, state, buttons and facts."""
    return render(
        "run_title", name=live.run.path.name, pill=pill(state), state=state.state,
        can_finish=not live.run.finish_request.exists(), about=about(live),
    )  # fmt: skip


def about(live: LiveRun) -> list[str]:
    """Return model, data, method, GPU and start time."""
    plan, settings = live.plan(), live.plan().settings
    data = Path(str(settings.dataset.path)).name if settings.dataset.path else tr("the bundled data")
    if plan.data:
        data += f" · {tr_n('{n} row', '{n} rows', plan.data.rows)}"
    method = tr("{precision} LoRA, rank {rank}", precision=precision(settings), rank=settings.lora_r)
    started = tr("started {time}", time=clock(live.run.plan.stat().st_mtime))
    where = tr("on the CPU") if plan.card.is_cpu else tr("on {gpu}", gpu=plan.card.name)
    return [Path(settings.model_name_or_path).name, data, method, where, started]


def progress(live: LiveRun, state: RunState) -> str:
    """Return the finished steps and the time left."""
    return render(
        "run_progress", live=live, digest=live.digest, settings=live.plan().settings, state=state, name=state_name(state.state),
        css=STATES.get(state.state, ("", ""))[1], now_s=time.time(), ended=live.digest.newest.get(State.kind),
    )  # fmt: skip


def now(live: LiveRun, state: RunState) -> str:
    """Return the smaller plan after out of memory, or the next steps of an ended run."""
    newest, changes = live.digest.newest, ""
    if isinstance(retry := newest.get(Retry.kind), Retry) and OutOfMemory.kind in newest:
        changes = in_words(" ".join(f"{name}={str(value).lower()}" for name, value in retry.changes.items()))
    return render(
        "run_now", run=live.run.path.name, state=state.state, step=live.digest.step, changes=changes, tabs=TABS,
        is_full=state.exit_code == DiskFull.exit_code, is_cpu=live.plan().card.is_cpu, result=newest.get(Result.kind),
    )  # fmt: skip


def failure(live: LiveRun, state: RunState) -> str:
    """Return the cause of a failure, with buttons for remedies."""
    return render("run_failure", explanation=explanation_of(live, state), run=live.run.path.name)


def explanation_of(live: LiveRun, state: RunState) -> Safe:
    """Return state and cause of a failure."""
    event = live.digest.newest.get(OutOfMemory.kind)
    lines = [state.message or tr("It left no message.")]
    if state.state == "failed" and isinstance(event, OutOfMemory):
        lines.append(explanation(event))
    return Safe(f"<h2>{inert(state_name(state.state))}</h2>{''.join(f'<p>{inert(line)}</p>' for line in lines)}")


def figures(digest: Digest, plan: Plan) -> str:
    """Return loss, held-out loss, peak, speed and GPU, each beside a reference."""
    loss, held_out = digest.series.get("loss"), digest.series.get("eval_loss")
    averages = [average for _, average in smoothed(loss.points()) if average is not None] if loss else []
    evaluation, step = digest.newest.get(Evaluation.kind), digest.newest_step
    rate = step.tokens_per_s if step else None
    return render(
        "figures", loss=loss, average=averages[-1] if averages else None,
        held_out=held_out if held_out and held_out.last is not None else None,
        held_out_step=evaluation.step if isinstance(evaluation, Evaluation) else held_out and held_out.last_step,
        lowest=held_out.lowest_bin if held_out else None, measured=measured_peak(digest, plan), forecast=plan.forecast,
        is_cpu=plan.card.is_cpu, step=step, rate=rate if rate is not None and math.isfinite(rate) else None,
        deviation=_deviation_text,
    )  # fmt: skip


def _deviation_text(measured: float, forecast: float) -> str:
    percent = round(100 * (measured / forecast - 1), 1)
    sign = "−" if percent < 0 else "+" if percent else ""
    return f"{sign}{abs(percent):.1f} %"


def memory(digest: Digest, plan: Plan) -> str:
    """Return measured beside forecast memory by phase, and the forecast's parts."""
    forecast, measured = plan.forecast, measured_peak(digest, plan)
    # name, forecast and measured bytes; None if unknown
    pairs = [(tr("Process"), forecast.peak_bytes if forecast else None, measured)]
    if not plan.card.is_cpu:
        pairs += [
            (tr(name), forecast.of_phase(phase).allocated_bytes if forecast else None, digest.phase_peaks[phase])
            for phase, name in _PHASE_NAMES.items() if phase in digest.phase_peaks
        ]  # fmt: skip
    pairs = [pair for pair in pairs if pair[1:] != (None, None)]
    # 6 % of space right of the longest bar
    full_bytes = 1.06 * max([1, *(size or 0 for _, *sizes in pairs for size in sizes)])
    parts = {name: size for name, size in memory_bar_parts(plan)[0].items() if name not in _NOT_OF_TRAINING} if forecast else {}
    return render(
        "memory", plan=plan, measured=measured, pairs=pairs, parts=parts, scaled=lambda size: f"{100 * size / full_bytes:.2f}%",
        deviation=_deviation_text,
    )  # fmt: skip


def memory_bar_parts(plan: Plan) -> tuple[dict[str, int], int]:
    """Return the bytes of each part of the memory bar, and the excess bytes."""
    forecast, total = plan.forecast, plan.card.total_bytes
    assert forecast is not None

    def bytes_of(*names: str) -> int:
        return sum(forecast.parts.get(name, 0) for name in names)

    parts = {
        "weights": bytes_of("weights"), "gathered": bytes_of("gathered"),
        "adapters": bytes_of("adapters", "gradients", "optimizer"),
        "activations": bytes_of("activations", "recomputed"), "loss": bytes_of("loss", "workspace"),
        # the CUDA context, and memory that the allocator holds
        "overhead": max(0, forecast.peak_bytes - forecast.allocated_bytes),
        # the plan must fit with the whole margin
        "spread": max(0, forecast.peak_high_bytes - forecast.peak_bytes),
    }  # fmt: skip
    used, budget = sum(parts.values()), min(plan.usable_bytes, total)
    parts |= {"free": max(0, budget - used), "held": total - budget}
    return {key: size for key, size in parts.items() if size > 0}, max(0, used - budget)


def settings_table(plan: Plan) -> Safe:
    """Return the main settings with their reasons, then all settings."""
    return render("choices", plan=plan, settings=plan.settings, as_set=AS_SET)


def messages(digest: Digest) -> Safe:
    """Return states, retries and warnings."""
    return render(
        "messages", events=list(reversed(digest.messages)), kinds=_MESSAGE_KIND_NAMES, explanation=explanation,
        hour=lambda event: time.strftime("%H:%M:%S", time.localtime(event.time_s or 0)),
    )  # fmt: skip


def pill(state: RunState) -> Safe:
    """Return the state as a coloured badge."""
    name, css = STATES.get(state.state, (state.state.capitalize(), "plain"))
    if state.exit_code == DiskFull.exit_code:
        name = mark("Paused, disk full")
    live = " live" if state.state in ("running", "starting", "pausing") else ""
    return Safe(f'<span class="ft-pill {css}{live}" data-state="{inert(state.state)}"><i></i>{inert(tr(name))}</span>')


def _log_tail(live: LiveRun) -> str:
    try:
        with live.run.log.open("rb") as file:
            file.seek(max(0, live.run.log.stat().st_size - LOG_BYTES))
            return file.read(LOG_BYTES).decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
