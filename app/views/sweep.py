"""A sweep as HTML: line on Runs, result, curves and table of arms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..browser_files import chart_element, has_charts
from ..language import mark, tr
from .markup import Safe, as_on_page, inert, interval_text, render, table
from .svg_charts import Line, picture
from .words import setting_name, state_name, value_text

if TYPE_CHECKING:
    from finetune.sweep.sweep import ArmResult, Sweep

#: Curves that can be told apart in one chart.
MOST_CURVES = 5
#: States of arms only.
_ARM_STATES = {"waiting": mark("Waiting"), "dropped": mark("Dropped")}


def sentence(sweep: Sweep) -> str:
    """Return the result in words."""
    return "; ".join(map(as_on_page, sweep.sentence(arm_name).split("; ")))


def arm_name(values: dict[str, Any]) -> str:
    """Return `Learning rate 0.0002 · LoRA rank 16`."""
    return " · ".join(f"{setting_name(name)} {value_text(value)}" for name, value in values.items())


def page(sweep: Sweep, tab: str) -> str:
    """Return the page of a sweep: rule and command, the curves of the best arms, and the place of `arms`."""
    from finetune.sweep.sweep import RULE

    results, name = sweep.results(), sweep.path.name
    best = sorted(results[:MOST_CURVES], key=lambda entry: entry.name)
    element = chart_element([entry.name for entry in best], [arm_name(entry.values) for entry in best]) if has_charts() else ""
    return render(
        "sweep", name=name, tab=tab, rule=as_on_page(RULE), most=MOST_CURVES, chart=Safe(element),
        command="" if sweep.is_finished else f"finetune sweep {sweep.path}", has_fewer=len(results) > MOST_CURVES,
        losses="" if element else Safe(losses(sweep)), parts={"arms": arms(sweep)},
    )  # fmt: skip


def arms(sweep: Sweep) -> str:
    """Return the result in words and the table of arms."""
    linked = arms_table(sweep.results(), lambda entry: f'<a href="/run?run={quote(entry.name)}">{inert(entry.name)}</a>')
    state = tr("{sentence}.", sentence=state_of(sweep))
    return f'<section class="ft-box"><p role="status"><b>{state}</b> {inert(sentence(sweep))}</p>{linked}</section>'


def losses(sweep: Sweep) -> str:
    """Return the held-out losses of all arms as SVG."""
    curves = [
        Line(arm_name(entry.values), [(float(step), loss) for step, loss in entry.curve], f"run{number}")
        for number, entry in enumerate(sweep.results())
    ]
    return picture(tr("Held-out loss of each arm"), curves, "{:.3g}".format)


def arms_table(results: Sequence[ArmResult], run: Callable[[ArmResult], str]) -> str:
    """Return the table of arms; `run`: HTML that names an arm's run."""
    rows = []
    for entry in results:
        gap = entry.behind
        behind = "" if gap is None else f"{gap.value:+.4f} ({interval_text(gap.low, gap.high)})"
        state = tr(_ARM_STATES[entry.state]) if entry.state in _ARM_STATES else state_name(entry.state)
        state = state if entry.dropped_at is None else tr("dropped at {step}", step=f"{entry.dropped_at:,}")
        loss = tr("not measured") if entry.loss is None else f"{entry.loss:.4f}"
        rows.append([arm_name(entry.values), state, f"{entry.step or 0:,}", loss, behind, Safe(run(entry))])
    numbers = (tr("steps"), tr("held-out loss"), tr("behind the best (95 % interval)"))
    columns = [tr("arm"), tr("state"), *(f">{name}" for name in numbers), tr("run")]
    return table(columns, rows, tr("Arms"), hidden_caption=True)


def state_of(sweep: Sweep) -> str:
    """Return whether the sweep goes on, in a word."""
    if sweep.is_running:
        return tr("Running")
    return tr("Finished" if sweep.is_finished else "Stopped")
