"""`GET /ft/series/RUN?have=VERSION&from=&to=&points=`: the points of `<ft-chart>`. Reads only; its answers are bounded.

With `tab=TAB&shown=CHECKSUMS` the answer has, too, the parts of that tab of the run's page that the browser has not, so that a
page that follows a run asks once in a tick.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from fastapi import Request, Response

from finetune.errors import FinetuneError

from ..context import Context
from ..views import run_page
from ..views.chart_series import answer, zoomed
from ..views.run_head import TABS
from ..views.series import MOST_BINS
from .own_files import compressed

_VERSION = re.compile(r"([0-9a-f]{8})-([0-9]{1,12})-([0-9]{1,10})")
_STEP = re.compile(r"[0-9]{1,12}")
_SHOWN = re.compile(r"[0-9a-f.]{0,200}")
_FEWEST_POINTS = 20


class RefusedError(ValueError):
    """A parameter is wrong; the text says which and what it may be."""


def series_of(context: Context) -> Callable[[str, Request], Response]:
    """The route's handler."""

    def handler(name: str, request: Request) -> Response:
        try:
            run = context.workspace.run(name)
        except OSError:  # a name that no file can have
            run = None
        if run is None:
            return _plain(404, "There is no such run.")
        live, query = context.lives.of(run), dict(request.query_params)
        try:
            points = _number(query, "points", _FEWEST_POINTS, MOST_BINS, MOST_BINS)
            if "from" in query or "to" in query:
                body = zoomed(live, *_range(query), points)
            else:
                body = answer(live, _version(query.get("have", "")), points)
            if "tab" in query:
                body["parts"] = run_page.changed(live, *_tab(query))
        except RefusedError as error:
            return _plain(400, str(error))
        except (FinetuneError, OSError, ValueError, KeyError):
            return _plain(404, "This run's files can't be read.")
        text = json.dumps(body, separators=(",", ":"), allow_nan=False)
        content, encoding = compressed(text.encode(), request.headers.get("accept-encoding", ""))
        return Response(content, media_type="application/json", headers={"cache-control": "no-store", **encoding})

    return handler


def _version(text: str) -> tuple[str, int, int] | None:
    if not text:
        return None
    match = _VERSION.fullmatch(text)
    if match is None:
        raise RefusedError("`have` is the version of an earlier answer.")
    return match[1], int(match[2]), int(match[3])


def _tab(query: dict[str, str]) -> tuple[str, list[str]]:
    tab, shown = query["tab"], query.get("shown", "")
    if tab not in TABS or not _SHOWN.fullmatch(shown):
        raise RefusedError("`tab` is one of the run's page, `shown` has checksums of its parts.")
    return tab, shown.split(".")


def _range(query: dict[str, str]) -> tuple[int, int]:
    start, stop = (_number(query, name, 0, 10**12, None) for name in ("from", "to"))
    if start > stop:
        raise RefusedError("`from` is a step before `to`.")
    return start, stop


def _number(query: dict[str, str], name: str, lowest: int, highest: int, default: int | None) -> int:
    text = query.get(name, "" if default is None else str(default))
    if not _STEP.fullmatch(text) or not lowest <= int(text) <= highest:
        raise RefusedError(f"`{name}` is a whole number from {lowest} to {highest}.")
    return int(text)


def _plain(status: int, text: str) -> Response:
    return Response(text, status_code=status, media_type="text/plain; charset=utf-8", headers={"cache-control": "no-store"})
