"""Comparison of runs: their curves in one chart, and the settings that differ."""

from __future__ import annotations

from finetune.units import GIB

from ..live import Digest, LiveRun
from .charts import Line, Panel, chart
from .markup import inert, note, table
from .series import smoothed

_SMOOTHING = 0.8
_MEMORY = ("peak_allocated_bytes", "process_rss_bytes")


def comparison(lives: list[LiveRun], element: str = "") -> str:
    """Loss and memory of runs in one chart, `element` or else SVG, and the settings that differ."""
    if element:
        return element + _differences(lives)
    panels = [_overlay("Loss, smoothed", lives, ("loss",), 1.0), _overlay("Memory, GiB", lives, _MEMORY, GIB)]
    summary = "; ".join(f"{live.run.path.name}: last loss {last_loss(live.digest)}" for live in lives)
    picture = chart(panels, [], max(live.digest.step for live in lives), f"Comparison. {summary}")
    return f'{picture}<p class="ft-summary">{inert(summary)}</p>{_differences(lives)}'


def _differences(lives: list[LiveRun]) -> str:
    settings = [live.plan().settings.model_dump(mode="json") for live in lives]
    names = [name for name in settings[0] if len({repr(values.get(name)) for values in settings}) > 1 and name != "output_dir"]
    if not names:
        return note("These runs have the same settings.")
    rows = [[name, *(str(values.get(name)) for values in settings)] for name in names]
    return table(["setting", *(live.run.path.name for live in lives)], rows, "Settings that differ")


def _overlay(title: str, lives: list[LiveRun], names: tuple[str, ...], unit: float) -> Panel:
    """One line for each run: the first of the metrics that it has."""
    lines = []
    for number, live in enumerate(lives):
        series = next((live.digest.series[name] for name in names if name in live.digest.series), None)
        if series is not None:
            points = smoothed(series.means(), _SMOOTHING) if unit == 1.0 else series.means()
            lines.append(Line(live.run.path.name, points, f"run run{number}"))
    return Panel(title, lines, lambda value: f"{value / unit:.3g}", unit=unit)


def last_loss(digest: Digest) -> str:
    """The newest step's training loss; where it is not a number, that, and the last one that was."""
    loss = digest.series.get("loss")
    if loss is None:
        return "not measured"
    return loss.newest_text("{:.4f}".format) if loss.missing or loss.last is None else f"{loss.last:.4f}"
