"""What the page's browser loads of other projects, uPlot and the Inter font: there when the build could fetch it."""

from __future__ import annotations

import json
from pathlib import Path

from .views.markup import inert

FOLDER = Path(__file__).parent / "fetched"
_SUFFIXES = (".js", ".css", ".woff2")


def fetched_files() -> list[Path]:
    """The files to serve; none where nothing was fetched."""
    return sorted(path for path in FOLDER.glob("*") if path.suffix in _SUFFIXES)


def has_charts() -> bool:
    """True where `<ft-chart>` can draw; else charts are SVG from the server."""
    return (FOLDER / "uplot.js").is_file()


def chart_element(runs: list[str]) -> str:
    """The chart of a run, or of several in comparison. It gets its points itself, so this text stays while a run goes on."""
    return f'<ft-chart data-runs="{inert(json.dumps(runs), 10_000)}"></ft-chart>'
