"""Comparison of runs: curves in one chart, figures, differing settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from finetune.run.best import compare_held_out
from finetune.units import format_bytes

from ..language import tr
from ..live import LiveRun
from .charts import Line, picture
from .markup import inert, note, table
from .run_row import RunRow
from .series import Point, Series, smoothed
from .words import setting_name, value_text

_SMOOTHING = 0.8
_MEMORY = ("peak_allocated_bytes", "process_rss_bytes")


def comparison(lives: list[LiveRun], element: str = "", rows: Sequence[RunRow] = ()) -> str:
    """Return loss and memory of runs in `element` or SVG, their figures, and differing settings."""
    template, values = compare_held_out([live.run for live in lives])
    held_out = tr(template, **values)
    if element:
        return f"{element}{note(held_out)}{_figures(rows)}{_differences(lives)}"
    losses = _overlay(lives, ("loss",), lambda series: smoothed(series.points(), _SMOOTHING))
    memory = _overlay(lives, _MEMORY, lambda series: series.points(highest=True))
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
