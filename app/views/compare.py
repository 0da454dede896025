"""Comparison of runs: their curves in one chart, and the settings that differ."""

from __future__ import annotations

from collections.abc import Sequence

from finetune.run.best import compare_held_out
from finetune.units import GIB

from ..language import tr
from ..live import LiveRun
from .charts import Line, Panel, chart
from .markup import inert, note, table
from .run_row import RunRow
from .series import smoothed
from .words import setting_name, value_text

_SMOOTHING = 0.8
_MEMORY = ("peak_allocated_bytes", "process_rss_bytes")


def comparison(lives: list[LiveRun], element: str = "", rows: Sequence[RunRow] = ()) -> str:
    """Loss and memory of runs in one chart, `element` or else SVG, their figures, and the settings that differ."""
    template, values = compare_held_out([live.run for live in lives])
    held_out = tr(template, **values)
    if element:
        return f"{element}{note(held_out)}{_figures(rows)}{_differences(lives)}"
    panels = [_overlay(tr("Loss, smoothed"), lives, ("loss",), 1.0), _overlay(tr("Memory, GiB"), lives, _MEMORY, GIB)]
    picture = chart(panels, [], max(live.digest.step for live in lives), held_out)
    return f'{picture}<p class="ft-summary">{inert(held_out)}</p>{_figures(rows)}{_differences(lives)}'


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


def _overlay(title: str, lives: list[LiveRun], names: tuple[str, ...], unit: float) -> Panel:
    lines = []
    for number, live in enumerate(lives):
        series = next((live.digest.series[name] for name in names if name in live.digest.series), None)
        if series is not None:
            points = smoothed(series.means(), _SMOOTHING) if unit == 1.0 else series.means()
            lines.append(Line(live.run.path.name, points, f"run run{number}"))
    return Panel(title, lines, lambda value: f"{value / unit:.3g}", unit=unit)
