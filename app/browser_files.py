"""Files for browsers: the page's own, uPlot and Inter, at addresses that browsers cache."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from fastapi import Request, Response

from .views.markup import inert

FOLDER = Path(__file__).parent / "fetched"
#: Files in FOLDER exist only if the build could fetch them.
_KINDS = {".js": "text/javascript", ".css": "text/css", ".woff2": "font/woff2", ".svg": "image/svg+xml"}


def fetched_files() -> list[Path]:
    """Return the files to serve."""
    return sorted(path for path in FOLDER.glob("*") if path.suffix in _KINDS)


def has_charts() -> bool:
    """Return whether `<ft-chart>` can draw."""
    return (FOLDER / "uplot.js").is_file()


def chart_element(runs: Sequence[str], labels: Sequence[str] = ()) -> str:
    """Return the chart of one run, or of several to compare."""
    called = f' data-labels="{inert(json.dumps([*labels]), 10_000)}"' if labels else ""
    # the element fetches its points: this text stays equal while a run goes on
    return f'<ft-chart data-runs="{inert(json.dumps([*runs]), 10_000)}"{called}></ft-chart>'


#: Files of the page itself.
OWN_FILES = sorted(path for path in Path(__file__).parent.glob("*") if path.suffix in _KINDS)
_NAMES_AND_BODIES = [(path.name.encode(), path.read_bytes()) for path in [*OWN_FILES, *fetched_files()]]
#: Folder of the page's files and of fetched files: another address after any change.
OWN_FOLDER = f"/ft/v{zlib.crc32(repr(_NAMES_AND_BODIES).encode()):08x}"


def own_file(path: Path) -> Callable[[Request], Response]:
    """Return the handler of a file."""
    body, media_type = path.read_bytes(), _KINDS[path.suffix]
    tag = f'"{zlib.crc32(body):08x}"'

    def handler(request: Request) -> Response:
        is_current = request.url.path.startswith(f"{OWN_FOLDER}/")
        # an address with an old checksum gets the current file, uncached
        headers = {"etag": tag, "cache-control": "private, max-age=31536000, immutable" if is_current else "no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(body, media_type=media_type, headers=headers)

    return handler
