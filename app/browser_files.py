"""Files of other projects for the browser, uPlot and the Inter font: present when the build could fetch them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .views.markup import inert

FOLDER = Path(__file__).parent / "fetched"
_SUFFIXES = (".js", ".css", ".woff2")


def fetched_files() -> list[Path]:
    """The files to serve; none where nothing was fetched."""
    return sorted(path for path in FOLDER.glob("*") if path.suffix in _SUFFIXES)


def has_charts() -> bool:
    """True where `<ft-chart>` can draw; else tables replace charts."""
    return (FOLDER / "uplot.js").is_file()


def chart_element(runs: Sequence[str], labels: Sequence[str] = ()) -> str:
    """The chart of a run, or of several in comparison. It gets its points itself, so this text stays while a run goes on.

    `labels`: names of the runs in the chart, if different.
    """
    called = f' data-labels="{inert(json.dumps([*labels]), 10_000)}"' if labels else ""
    return f'<ft-chart data-runs="{inert(json.dumps([*runs]), 10_000)}"{called}></ft-chart>'
