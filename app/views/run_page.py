"""Run page as HTML: head, tabs, and the parts that the browser follows."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from urllib.parse import quote

from finetune.errors import RecipeError
from finetune.recipe import parse_recipe

from ..browser_files import chart_element, has_charts
from ..language import mark, tr
from ..live import LiveRun
from ..planning.draft import command_line
from . import run as run_view
from .answers import answers
from .choices import chosen
from .markup import inert, note, part
from .run_figures import figures, memory
from .run_head import BROKEN, failure, next_steps, progress, survived, tabs, title

_PROMPTS_SHOWN = 3
_STEPS_SHOWN = 3
_NO_CHARTS = mark("Charts need uPlot, which the build could not fetch: build again with a connection.")
_NO_SAMPLES = mark("The model answers held-out prompts at each evaluation; here they stand side by side.")


def page(name: str, tab: str, head: str, body: str) -> str:
    """Return the page of a run or a sweep; `run.js` follows its parts."""
    address = f"/ft/run/{quote(name, safe='')}"
    return (
        f'<div id="run-page" class="ft-page" data-run="{inert(name)}" data-tab="{tab}" data-address="{address}" '
        f'data-follow="{address}?tab={tab}" data-every="1000">'
        f'<div id="run-head">{head}</div><div id="run-body">{body}</div></div>'
    )


def head(parts: Mapping[str, str]) -> str:
    """Return the head with its parts."""
    return (
        f'{part("title", parts)}<div data-said role="status"></div>{part("progress", parts)}'
        f'<p id="run-lost" role="status" hidden></p>{part("now", parts)}{part("tabs", parts)}'
    )


def body(live: LiveRun, forms: Mapping[str, str], parts: Mapping[str, str]) -> str:
    """Return the tabs. `forms`: HTML of tabs with forms; `parts`: HTML of the open tab."""
    chart = chart_element([live.run.path.name]) if has_charts() else part("curves", parts)
    overview = (
        f'{part("figures", parts)}<div class="ft-two"><section class="ft-box" aria-label="{tr("Curves")}">{chart}</section>'
        f"{part('memory', parts, 'ft-box ft-memory')}</div>{part('answers', parts)}"
    )
    log = f"{part('messages', parts, 'ft-box')}{part('log', parts, 'ft-box')}"
    panes = {
        "overview": overview,
        "samples": part("samples", parts, "ft-box"),
        **forms,
        "settings": _settings(live),
        "log": log,
    }
    return "".join(f'<div class="ft-pane ft-pane-{name}">{pane}</div>' for name, pane in panes.items())


def empty() -> str:
    """Return the page without a run."""
    return (
        f'<div class="ft-empty" data-title="{tr("Run")}"><h1 class="ft-title">{tr("No run yet")}</h1>'
        f"<p>{tr('A run shows here while it trains, and stays when it is done.')}</p>"
        f'<p><a class="ft-button primary" href="/">{tr("New run")}</a></p></div>'
    )


def texts(live: LiveRun, tab: str) -> dict[str, str]:
    """Return the HTML of each part of the head and of a tab without forms."""
    is_read, state, digest, plan = live.refresh(), live.state(), live.digest, live.plan()
    reading = "" if is_read else note(tr("Reading this run's history: {share}", share=f"{live.progress:.0%}"))
    shown = {
        "title": title(live, state),
        "progress": progress(live, state) + reading,
        "now": survived(live) + next_steps(live, state),
    }
    shown["tabs"] = tabs(live.run.path.name, len(digest.samples), tab)
    if tab == "overview":
        shown["figures"] = failure(live, state) if state.state in BROKEN else figures(digest, plan)
        shown["memory"] = memory(digest, plan)
        shown["answers"] = _answers(live)
        if not has_charts():
            shown["curves"] = note(tr(_NO_CHARTS)) + run_view.numbers(digest, plan)
    elif tab == "samples":
        table = answers(digest.samples, most_steps=_STEPS_SHOWN)
        shown["samples"] = f"<h2>{tr('Answers as it learns')}</h2>{table or note(tr(_NO_SAMPLES))}"
    elif tab == "log":
        shown["messages"] = f"<h2>{tr('Messages')}</h2>{run_view.messages(digest)}"
        shown["log"] = f"<h2>{tr('End of the log')}</h2>{run_view.log_tail(live)}"
    return shown


def _answers(live: LiveRun) -> str:
    table = answers(live.digest.samples, _PROMPTS_SHOWN)
    if not table:
        return ""
    address = f"/run?run={quote(live.run.path.name)}&amp;tab=samples"
    head = f'<h2>{tr("Answers as it learns")}</h2><a href="{address}" data-tab="samples">{tr("All samples")}</a>'
    return f'<section class="ft-box"><div class="ft-boxhead">{head}</div>{table}</section>'


def _settings(live: LiveRun) -> str:
    try:
        text = live.run.recipe.read_text(encoding="utf-8")
    except OSError:
        text = ""
    command = ""
    with contextlib.suppress(RecipeError):  # a hand-edited recipe may be invalid
        typed = command_line(parse_recipe(text))
        command = f'<h3>{tr("The same as a command")}</h3><p class="ft-mono">{inert(typed)}</p>'
    shown = f'<pre class="ft-log" tabindex="0" role="region" aria-label="{tr("Recipe")}">{inert(text, 100_000)}</pre>{command}'
    return (
        f'<section class="ft-box"><h2>{tr("What was chosen, and why")}</h2>{chosen(live.plan())}</section>'
        f'<section class="ft-box"><h2>{tr("Recipe")}</h2>{shown}</section>'
    )
