"""Run page as HTML: head, tabs, and the parts that the browser follows."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from pathlib import Path

from finetune.errors import DiskFull, RecipeError
from finetune.events import Checkpoint, OutOfMemory, Result, Retry, State
from finetune.recipe import parse_recipe
from finetune.run.out_of_memory import explanation_lines
from finetune.run.state import RunState

from ..language import mark, tr, tr_n
from ..live import LiveRun
from ..planning.draft import command_line
from . import run as run_view
from .answers import answers
from .charts import curves
from .markup import Safe, as_on_page, chart_element, has_charts, inert, note, render
from .run import chosen, figures, memory
from .words import STATES, clock, in_words, precision, state_name

#: Address and name of each tab.
TABS = {
    "overview": mark("Overview"), "samples": mark("Samples"), "evaluate": mark("Evaluate"), "chat": mark("Chat"),
    "export": mark("Export"), "settings": mark("Settings"), "log": mark("Log"),
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


def page(live: LiveRun, tab: str, forms: Mapping[str, str], parts: Mapping[str, str]) -> str:
    """Return the page of a run. `forms`: HTML of tabs with forms; `parts`: HTML of the head and of the open tab."""
    text = command = ""
    with contextlib.suppress(OSError):
        text = live.run.recipe.read_text(encoding="utf-8")
    with contextlib.suppress(RecipeError):  # a hand-edited recipe may be invalid
        command = command_line(parse_recipe(text))
    name = live.run.path.name
    return render(
        "run", name=name, tab=tab, parts=parts, forms={key: Safe(form) for key, form in forms.items()},
        chart=chart_element([name]), chosen=chosen(live.plan()),
        recipe=Safe(inert(text, 100_000)), command=command,
    )  # fmt: skip


def texts(live: LiveRun, tab: str) -> dict[str, str]:
    """Return the HTML of each part of the head and of a tab without forms."""
    is_read, state, digest, plan = live.refresh(), live.state(), live.digest, live.plan()
    reading = "" if is_read else note(tr("Reading this run's history: {share}", share=f"{live.progress:.0%}"))
    name = live.run.path.name
    shown = {
        "title": title(live, state),
        "progress": progress(live, state) + reading,
        "now": now(live, state),
        "tabs": render("run_tabs", run=name, tabs=TABS, n_samples=len(digest.samples), open=tab),
    }
    if tab == "overview":
        shown["figures"] = failure(live, state) if state.state in BROKEN else figures(digest, plan)
        shown["memory"] = memory(digest, plan)
        shown["answers"] = render("run_answers", run=name, table=Safe(answers(digest.samples, _PROMPTS_SHOWN)))
        if not has_charts():
            how = tr("Charts need uPlot, which the build could not fetch. Build again with a network connection.")
            shown["curves"] = note(how) + curves(live)
    elif tab == "samples":
        none = note(tr("At each evaluation the model answers held-out prompts. The answers appear here side by side."))
        table = answers(digest.samples, most_steps=_STEPS_SHOWN)
        shown["samples"] = f"<h2>{tr('Answers as it learns')}</h2>{table or none}"
    elif tab == "log":
        shown["messages"] = f"<h2>{tr('Messages')}</h2>{run_view.messages(digest)}"
        shown["log"] = render("log", text=Safe(inert(run_view.log_tail(live), run_view.LOG_BYTES)))
    return shown


def title(live: LiveRun, state: RunState) -> str:
    """Return name, state, buttons and facts."""
    return render(
        "run_title", name=live.run.path.name, pill=run_view.pill(state), state=state.state,
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
        why = " ".join(map(as_on_page, explanation_lines(event)))
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
