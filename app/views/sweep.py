"""A sweep as HTML: line on Runs, result, curves and table of arms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..browser_files import chart_element, has_charts
from ..language import mark, tr
from .charts import Line, picture
from .lists import Item, item_list
from .markup import Safe, as_on_page, inert, interval_text, note, part, table
from .run_head import STATES
from .words import setting_name, value_text

if TYPE_CHECKING:
    from finetune.sweep.sweep import ArmResult, Sweep

#: Curves that can be told apart in one chart.
MOST_CURVES = 5
#: States of arms only.
_ARM_STATES = {"waiting": mark("Waiting"), "dropped": mark("Dropped")}


def listed(sweeps: Sequence[Sweep]) -> str:
    """Return the sweeps; empty without sweeps."""
    summaries = [tr("{n} arms: {result}", n=len(sweep.study.trials), result=sentence(sweep)) for sweep in sweeps]
    rows = zip(sweeps, summaries, strict=True)
    return item_list(tr("Sweeps"), [Item(summary, _state(sweep), run=sweep.path.name) for sweep, summary in rows])


def sentence(sweep: Sweep) -> str:
    """Return the result in words."""
    return "; ".join(map(as_on_page, sweep.sentence(arm_name).split("; ")))


def arm_name(values: dict[str, Any]) -> str:
    """Return `Learning rate 0.0002 · LoRA rank 16`."""
    return " · ".join(f"{setting_name(name)} {value_text(value)}" for name, value in values.items())


def head(sweep: Sweep) -> str:
    """Return name, rule and command of a sweep."""
    from finetune.sweep.sweep import RULE

    name = inert(sweep.path.name)
    more = tr("To follow it, or to go on with it: {command}", command=f"finetune sweep {sweep.path}")
    return (
        f'<h1 class="ft-title" data-title="{name}">{name}</h1>'
        '<p id="run-lost" role="status" hidden></p>'
        f"{note(' '.join((tr('A sweep.'), as_on_page(RULE))))}"
        f"{'' if sweep.is_finished else note(more)}"
    )


def body(sweep: Sweep) -> str:
    """Return the curves of the best arms, and the place of `arms`."""
    results = sweep.results()
    chosen = sorted(results[:MOST_CURVES], key=lambda entry: entry.name)
    element = chart_element([entry.name for entry in chosen], [arm_name(entry.values) for entry in chosen])
    fewer = note(tr("The {n} arms with the lowest held-out losses as this page was opened.", n=MOST_CURVES))
    shown = f"{fewer if len(results) > MOST_CURVES else ''}{element}" if has_charts() else losses(sweep)
    return (
        f'<section class="ft-box"><h2>{tr("Arms")}</h2>{shown}</section>{part("arms", {"arms": arms(sweep)}, "", "run-arms")}'
    )


def arms(sweep: Sweep) -> str:
    """Return the result in words and the table of arms."""
    linked = arms_table(sweep.results(), lambda entry: f'<a href="/run?run={quote(entry.name)}">{inert(entry.name)}</a>')
    state = tr("{sentence}.", sentence=_state(sweep))
    return f'<section class="ft-box"><p role="status"><b>{state}</b> {inert(sentence(sweep))}</p>{linked}</section>'


def losses(sweep: Sweep) -> str:
    """Return the held-out losses of all arms as SVG."""
    curves = [
        Line(arm_name(entry.values), [(float(step), loss) for step, loss in entry.curve], f"run{number}")
        for number, entry in enumerate(sweep.results())
    ]
    return picture(tr("Held-out loss of every arm"), curves, "{:.3g}".format)


def arms_table(results: Sequence[ArmResult], run: Callable[[ArmResult], str]) -> str:
    """Return the table of arms; `run`: HTML that names an arm's run."""
    rows = []
    for entry in results:
        gap = entry.behind
        behind = "" if gap is None else f"{gap.value:+.4f} ({interval_text(gap.low, gap.high)})"
        state = tr(_ARM_STATES.get(entry.state) or STATES.get(entry.state, (entry.state, ""))[0])
        state = state if entry.dropped_at is None else tr("dropped at {step}", step=f"{entry.dropped_at:,}")
        loss = tr("not measured") if entry.loss is None else f"{entry.loss:.4f}"
        rows.append([arm_name(entry.values), state, f"{entry.step or 0:,}", loss, behind, Safe(run(entry))])
    numbers = (tr("steps"), tr("held-out loss"), tr("behind the best (95 % interval)"))
    columns = [tr("arm"), tr("state"), *(f">{name}" for name in numbers), tr("run")]
    return table(columns, rows, tr("Arms"), hidden_caption=True)


def _state(sweep: Sweep) -> str:
    if sweep.is_running:
        return tr("Running")
    return tr("Finished" if sweep.is_finished else "Stopped")
