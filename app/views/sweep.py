"""A sweep as HTML: line on Runs, result, curves and table of arms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..language import tr
from .markup import Safe, as_on_page, chart_element, has_charts, render
from .svg_charts import Line, picture
from .words import setting_name, value_text

if TYPE_CHECKING:
    from finetune.sweep.sweep import Sweep

#: Curves that can be told apart in one chart.
MOST_CURVES = 5


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


def arms(sweep: Sweep, *, in_report: bool = False) -> str:
    """Return the result in words and the table of arms; on the page with links to their runs."""
    return render(
        "arms", results=sweep.results(), state=state_of(sweep), sentence=sentence(sweep), in_report=in_report,
        arm_name=arm_name,
    )  # fmt: skip


def losses(sweep: Sweep) -> str:
    """Return the held-out losses of all arms as SVG."""
    curves = [
        Line(arm_name(entry.values), [(float(step), loss) for step, loss in entry.curve], f"run{number}")
        for number, entry in enumerate(sweep.results())
    ]
    return picture(tr("Held-out loss of each arm"), curves, "{:.3g}".format)


def state_of(sweep: Sweep) -> str:
    """Return whether the sweep goes on, in a word."""
    if sweep.is_running:
        return tr("Running")
    return tr("Finished" if sweep.is_finished else "Stopped")
