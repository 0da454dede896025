"""uPlot and Inter, which the build fetches for browsers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from .views.markup import inert

#: Its files exist only if the build could fetch them.
FOLDER = Path(__file__).parent / "fetched"
#: By suffix of a file.
MEDIA_TYPES = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2", ".svg": "image/svg+xml"}


def fetched_files() -> list[Path]:
    """Return the files to serve."""
    return sorted(path for path in FOLDER.glob("*") if path.suffix in MEDIA_TYPES)


def has_charts() -> bool:
    """Return whether `<ft-chart>` can draw."""
    return (FOLDER / "uplot.js").is_file()


def chart_element(runs: Sequence[str], labels: Sequence[str] = ()) -> str:
    """Return the chart of one run, or of several to compare."""
    called = f' data-labels="{inert(json.dumps([*labels]), 10_000)}"' if labels else ""
    # the element fetches its points: this text stays equal while a run goes on
    return f'<ft-chart data-runs="{inert(json.dumps([*runs]), 10_000)}"{called}></ft-chart>'
