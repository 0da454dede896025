"""A run as one line of a list."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from finetune.events import Result
from finetune.run.state import RunState
from finetune.units import GIB

from ..language import tr
from ..live import Digest, LiveRun
from ..scores import Scores
from .charts import sparkline
from .markup import Safe
from .run import measured_peak
from .series import Series
from .words import day, loss_text, minutes


@dataclass(frozen=True)
class RunRow:
    """Texts of one run; empty where unknown."""

    name: str
    model: str
    state: RunState
    steps: str
    loss: str
    curve: str
    held_out: str
    score: str
    peak: str
    time: str
    started: str
    tokens_per_s: str


def row_of(live: LiveRun, scores: Scores) -> RunRow:
    """Return the run's current facts."""
    live.refresh()
    digest, plan, name = live.digest, live.plan(), live.run.path.name
    total, loss = plan.total_steps, digest.series.get("loss")
    label = tr("Loss of {name}: {loss}", name=name, loss=loss.newest_text("{:.4f}".format)) if loss else ""
    rate = digest.newest_step and digest.newest_step.tokens_per_s
    steps = tr("{step} of {total}", step=f"{digest.step:,}", total=f"{total:,}") if total else f"{digest.step:,}"
    return RunRow(
        name, Path(plan.settings.model_name_or_path).name, live.state(), steps,
        _last(loss), Safe(sparkline(loss.points(), label)) if loss else "", _held_out(digest), scores.of(live.run),
        peak_beside_forecast(live), minutes(_training_s(digest)) if digest.step else "", _day(live.run.plan.stat().st_mtime),
        f"{rate:,.0f}" if rate else "",
    )  # fmt: skip


def peak_beside_forecast(live: LiveRun) -> str:
    """Return `20.9 / 21.1`: measured and forecast GiB of the process."""
    plan = live.plan()
    measured, forecast = measured_peak(live.digest, plan)[1], plan.forecast.peak_bytes if plan.forecast else None
    texts = [
        f"{size / GIB:.1f}" if size else missing for size, missing in ((measured, tr("not yet")), (forecast, tr("no forecast")))
    ]
    return "" if measured is None and forecast is None else " / ".join(texts)


def _last(loss: Series | None) -> str:
    if loss is None or loss.missing is None:
        return loss_text(loss.last or 0.0) if loss else ""
    return tr("{value} at {step}", value=tr(loss.missing[1]), step=f"{loss.missing[0]:,}")


def _held_out(digest: Digest) -> str:
    result, series = digest.newest.get(Result.kind), digest.series.get("eval_loss")
    # an ended run: the result's loss, else the lowest so far
    if isinstance(result, Result) and result.eval_loss is not None:
        return loss_text(result.eval_loss)
    return loss_text(series.low) if series is not None and series.low is not None else ""


def _training_s(digest: Digest) -> float:
    series = digest.series.get("step_s")
    return sum(part.total for part in series.bins.values()) if series else 0.0


def _day(moment_s: float) -> str:
    # today 14:58; 24 Nov; 24 Nov 2025
    moment, now = time.localtime(moment_s), time.localtime()
    if moment[:3] == now[:3]:
        return tr("today {time}", time=time.strftime("%H:%M", moment))
    return day(moment) if moment[0] == now[0] else tr("{day} {year}", day=day(moment), year=moment[0])
