"""Page of all runs as HTML: table, comparison, sweeps, queue, trash."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.events import Result
from finetune.run.best import compare_held_out
from finetune.run.state import RunState
from finetune.units import GIB, format_bytes

from ..language import mark, tr
from ..live import Digest, LiveRun
from .markup import Safe, action, as_on_page, inert, note, render, table
from .run import MEMORY, measured_peak, pill
from .scores import newest_score
from .series import Point, Series, smoothed
from .svg_charts import Line, picture, sparkline
from .sweep import sentence, state_of
from .words import QUEUE_STATES, STATES, clock, day, loss_text, minutes, setting_name, value_text

if TYPE_CHECKING:
    from finetune.sweep.sweep import Sweep

#: Smoothing of the losses in a comparison.
_SMOOTHING = 0.8
#: Columns: field of a row, CSS name, title, and whether the values are numbers.
_COLUMNS = (
    ("model", "model", mark("Model"), False), ("curve", "loss", mark("Loss"), False),
    ("held_out", "held", mark("Held out"), True), ("score", "score", mark("Score"), True),
    ("peak", "peak", mark("Peak / forecast, GiB"), True), ("time", "time", mark("Time"), True),
    ("started", "started", mark("Started"), False),
)  # fmt: skip


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


def row_of(live: LiveRun) -> RunRow:
    """Return the run's current facts."""
    live.refresh()
    digest, plan, name = live.digest, live.plan(), live.run.path.name
    total, loss = plan.total_steps, digest.series.get("loss")
    label = tr("Loss of {name}: {loss}", name=name, loss=loss.newest_text("{:.4f}".format)) if loss else ""
    rate = digest.newest_step and digest.newest_step.tokens_per_s
    steps = tr("{step} of {total}", step=f"{digest.step:,}", total=f"{total:,}") if total else f"{digest.step:,}"
    return RunRow(
        name, Path(plan.settings.model_name_or_path).name, live.state(), steps,
        _last(loss), Safe(sparkline(loss.points(), label)) if loss else "", _held_out(digest), newest_score(live.run),
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


def runs_table(rows: Sequence[RunRow]) -> str:
    """Return the table of runs."""
    columns = [(key, tr(title), f"c-{css}{' right' if number else ''}") for key, css, title, number in _COLUMNS]
    return render("runs_table", rows=rows, columns=columns, pill=pill, state_name=_state_name)


def _state_name(state: RunState) -> str:
    return tr(STATES.get(state.state, (state.state.capitalize(), ""))[0])


def sweeps(listed: Sequence[Sweep]) -> str:
    """Return the list of sweeps as HTML; empty without sweeps."""
    texts = [tr("{n} arms: {result}", n=len(sweep.study.trials), result=sentence(sweep)) for sweep in listed]
    rows = zip(listed, texts, strict=True)
    return item_list(tr("Sweeps"), [Item(text, state_of(sweep), run=sweep.path.name) for sweep, text in rows])


def queue(entries: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Return waiting and failed starts, newest first."""
    return item_list(tr("Queue"), [_entry(*entry) for entry in reversed(entries) if entry[1]["state"] != "started"])


def _entry(name: str, status: Mapping[str, Any]) -> Item:
    texts = [as_on_page(str(status["message"])), *(status.get("problems") or [])[:2]]
    is_waiting = status["state"] == "waiting"
    return Item(
        " ".join(filter(None, texts)), tr(QUEUE_STATES.get(status["state"], status["state"])),
        "bad" if status["state"] == "failed" else "", str(status.get("run") or ""),
        clock(int(name.partition("-")[0]) / 1e9),  # the name begins with nanoseconds
        tr("Remove") if is_waiting else "", {"cancel": name}, f"cancel-{name}",
    )  # fmt: skip


def trash(deleted: Sequence[tuple[str, Path]]) -> str:
    """Return deleted runs with Restore buttons."""
    restore = tr("Restore")
    items = [Item(name, button=restore, message={"restore": [path.name]}, key=path.name) for name, path in deleted]
    return item_list(tr("Trash"), items, tr("Deleted runs stay in the folder .trash beside the runs until you remove them."))


def undo(deleted: Sequence[tuple[str, Path]]) -> str:
    """Return the names of just deleted runs, with an Undo button."""
    text = tr("Deleted {name}." if len(deleted) == 1 else "Deleted {n} runs.", n=len(deleted), name=inert(deleted[0][0]))
    buttons = f"<button type='button' class='ft-act' {action(restore=[path.name for _, path in deleted])}>{tr('Undo')}</button>"
    return f'<div class="ft-undo" role="status"><p>{text}</p>{buttons}</div>'


@dataclass(frozen=True)
class Item:
    """One line of a list."""

    text: str
    state: str = ""
    css: str = ""
    run: str = ""
    time: str = ""
    button: str = ""
    #: Sent by the button.
    message: Mapping[str, Any] = field(default_factory=dict)
    key: str = ""


def item_list(title: str, items: Sequence[Item], hint: str = "") -> str:
    """Return a box with lines; empty without items."""
    return render("lines", title=title, lines=items, hint=hint)


def comparison(lives: list[LiveRun], element: str = "", rows: Sequence[RunRow] = ()) -> str:
    """Return loss and memory of runs in `element` or SVG, their figures, and differing settings."""
    template, values = compare_held_out([live.run for live in lives])
    held_out = tr(template, **values)
    if element:
        return f"{element}{note(held_out)}{_figures(rows)}{_differences(lives)}"
    losses = _overlay(lives, ("loss",), lambda series: smoothed(series.points(), _SMOOTHING))
    memory = _overlay(lives, MEMORY, lambda series: series.points(highest=True))
    pictures = picture(tr("Loss, smoothed"), losses, "{:.3g}".format) + picture(tr("Memory"), memory, format_bytes)
    return f'{pictures}<p class="ft-summary">{inert(held_out)}</p>{_figures(rows)}{_differences(lives)}'


def _figures(rows: Sequence[RunRow]) -> str:
    lines = [
        (tr("Held-out loss, best"), [row.held_out for row in rows]), (tr("Score, base → tuned"), [row.score for row in rows]),
        (tr("Loss, newest"), [row.loss for row in rows]), (tr("Peak / forecast, GiB"), [row.peak for row in rows]),
        (tr("Time in training steps"), [row.time for row in rows]), (tr("Tokens/s"), [row.tokens_per_s for row in rows]),
    ]  # fmt: skip
    shown = [[name, *(value or tr("none") for value in values)] for name, values in lines if any(values)]
    return table([tr("Figure"), *(f">{row.name}" for row in rows)], shown, tr("Scores and figures")) if shown else ""


def _differences(lives: list[LiveRun]) -> str:
    settings = [live.plan().settings.model_dump(mode="json") for live in lives]
    names = [name for name in settings[0] if len({repr(values.get(name)) for values in settings}) > 1 and name != "output_dir"]
    if not names:
        return note(tr("These runs have the same settings."))
    rows = [[setting_name(name), *(value_text(values.get(name)) for values in settings)] for name in names]
    return table([tr("Setting"), *(f">{live.run.path.name}" for live in lives)], rows, tr("Settings that differ"))


def _overlay(lives: list[LiveRun], names: tuple[str, ...], points: Callable[[Series], list[Point]]) -> list[Line]:
    return [
        Line(live.run.path.name, points(series), f"run{number}") for number, live in enumerate(lives)
        # a GPU's metric, else the host's
        if (series := next((live.digest.series[name] for name in names if name in live.digest.series), None)) is not None
    ]  # fmt: skip
