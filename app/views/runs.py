"""Page of all runs as HTML: table, comparison, sweeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.events import Result
from finetune.run.state import compare_held_out
from finetune.units import GIB, format_bytes

from ..language import tr
from ..live import Digest, LiveRun, Point, Series, smoothed
from .answers import newest_score
from .charts import MEMORY_METRICS, Line, measured_peak, sparkline, svg_chart
from .markup import Safe, chart_element, render
from .words import day, duration, loss_text, setting_name, value_text

if TYPE_CHECKING:
    from finetune.sweep import Sweep

_MOST_CURVES = 5  # can be told apart in one chart


def row_of(live: LiveRun, limit_s: float = 0.05) -> dict[str, Any]:
    """Return a run's table row as texts, reading new events for at most `limit_s`."""
    if limit_s > 0:
        live.refresh(limit_s)
    digest, name, loss = live.digest, live.run.path.name, live.digest.series.get("loss")
    total, rate = live.plan().total_steps, digest.newest_step.tokens_per_s if digest.newest_step else None
    label = tr("Loss of {name}: {loss}", name=name, loss=_loss_or_gap(loss))
    training_s = sum(bin_.total for bin_ in digest.series.get("step_s", Series()).bins.values())
    return {
        "name": name, "model": Path(live.plan().settings.model_name_or_path).name, "state": live.state(),
        "steps": tr("{step} of {total}", step=f"{digest.step:,}", total=f"{total:,}") if total else f"{digest.step:,}",
        "loss": _loss_or_gap(loss), "curve": Safe(sparkline(loss.points(), label)) if loss else "",
        "held_out": _held_out_text(digest), "score": newest_score(live.run), "peak": peak_beside_forecast(live),
        "time": duration(training_s) if digest.step else "", "started": _day(live.run.plan.stat().st_mtime),
        "tokens_per_s": f"{rate:,.0f}" if rate else "",
    }  # fmt: skip


def peak_beside_forecast(live: LiveRun) -> str:
    """Return `20.9 / 21.1`: measured and forecast GiB of the process."""
    plan = live.plan()
    measured = measured_peak(live.digest, plan)
    if measured is None and not plan.forecast:
        return ""
    measured_text = f"{measured / GIB:.1f}" if measured else tr("not yet")
    forecast_text = f"{plan.forecast.peak_bytes / GIB:.1f}" if plan.forecast else tr("no forecast")
    return f"{measured_text} / {forecast_text}"


def _loss_or_gap(loss: Series | None) -> str:
    if loss is None or loss.missing is None:
        return loss_text(loss.last or 0.0) if loss else ""
    return tr("{value} at {step}", value=tr(loss.missing[1]), step=f"{loss.missing[0]:,}")


def _held_out_text(digest: Digest) -> str:
    result, series = digest.newest.get(Result.kind), digest.series.get("eval_loss")
    # of an ended run the result's, else the lowest so far
    if isinstance(result, Result) and result.eval_loss is not None:
        return loss_text(result.eval_loss)
    lowest = series.lowest_bin if series else None
    return loss_text(lowest.low) if lowest else ""


def _day(moment_s: float) -> str:
    # today 14:58; 24 Nov; 24 Nov 2025
    moment, now = time.localtime(moment_s), time.localtime()
    if moment[:3] == now[:3]:
        return tr("today {time}", time=time.strftime("%H:%M", moment))
    return day(moment) if moment[0] == now[0] else tr("{day} {year}", day=day(moment), year=moment[0])


def comparison(lives: list[LiveRun], chart: Safe | None = None, rows: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return HTML that compares runs: curves in `chart` or SVG, `rows` of figures, differing settings."""
    template, values = compare_held_out([live.run for live in lives])
    recipes = [live.plan().settings.model_dump(mode="json") for live in lives]
    differences: list[list[str]] = []
    for name in recipes[0]:
        column = [settings.get(name) for settings in recipes]
        if name != "output_dir" and len(set(map(repr, column))) > 1:
            differences.append([setting_name(name), *map(value_text, column)])
    charts = ""
    if not chart:
        losses = _overlay(lives, ("loss",), lambda series: smoothed(series.points()))
        memory = _overlay(lives, MEMORY_METRICS, lambda series: series.points(highest=True))
        charts = svg_chart(tr("Loss, smoothed"), losses, "{:.3g}".format) + svg_chart(tr("Memory"), memory, format_bytes)
    return render(
        "comparison", chart=chart, pictures=Safe(charts), held_out=tr(template, **values), rows=rows,
        differences=differences, names=[f">{live.run.path.name}" for live in lives],
    )  # fmt: skip


def _overlay(lives: list[LiveRun], names: tuple[str, ...], points: Callable[[Series], list[Point]]) -> list[Line]:
    return [
        Line(live.run.path.name, points(series), f"run{number}") for number, live in enumerate(lives)
        # the first metric that the run has
        if (series := next((live.digest.series[name] for name in names if name in live.digest.series), None)) is not None
    ]  # fmt: skip


def arm_name(values: dict[str, Any]) -> str:
    """Return `Learning rate 0.0002 · LoRA rank 16`."""
    return " · ".join(f"{setting_name(name)} {value_text(value)}" for name, value in values.items())


def sweep_page(sweep: Sweep, tab: str) -> str:
    """Return a sweep's page: rule, command, curves of the best arms, and table of arms."""
    from finetune.sweep import RULE

    results, name = sweep.results(), sweep.path.name
    best = sorted(results[:_MOST_CURVES], key=lambda arm: arm.name)
    element = chart_element([arm.name for arm in best], [arm_name(arm.values) for arm in best])
    return render(
        "sweep", name=name, tab=tab, rule=RULE, most=_MOST_CURVES, chart=element, has_fewer=len(results) > _MOST_CURVES,
        command="" if sweep.is_finished or sweep.is_running else f"finetune sweep {sweep.path}", parts={"arms": arms(sweep)},
    )  # fmt: skip


def arms(sweep: Sweep, *, in_report: bool = False) -> str:
    """Return the result in words and the arms, on the page with links."""
    return render(
        "arms", results=sweep.results(), state=state_of_sweep(sweep), sentence=sweep.sentence(arm_name), in_report=in_report,
        arm_name=arm_name,
    )  # fmt: skip


def losses(sweep: Sweep) -> str:
    """Return the held-out losses of all arms as SVG."""
    curves = [
        Line(arm_name(arm.values), [(float(step), loss) for step, loss in arm.curve], f"run{number}")
        for number, arm in enumerate(sweep.results())
    ]
    return svg_chart(tr("Held-out loss of each arm"), curves, "{:.3g}".format)


def state_of_sweep(sweep: Sweep) -> str:
    """Return `Running`, `Finished` or `Stopped`."""
    if sweep.is_running:
        return tr("Running")
    return tr("Finished" if sweep.is_finished else "Stopped")
