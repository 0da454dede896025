"""Routes that follow a run. They only read, and their answers are bounded.

`GET /ft/series/RUN?have=KEY.STEP`: the data of `<ft-chart>`. `GET /ft/run/RUN?tab=TAB&shown=CHECKSUMS`: the parts of a tab of
the run's page that the browser has not.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from fastapi import Request, Response

from finetune.errors import FinetuneError

from ..context import Context
from ..live import LiveRun
from ..views import run_page
from ..views.chart_series import answer
from ..views.run_head import TABS

_HAVE = re.compile(r"([0-9a-f]{8}-[0-9]{1,9})\.([0-9]{1,12})", re.ASCII)
_SHOWN = re.compile(r"[0-9a-f.]{0,200}")
Handler = Callable[[str, Request], Response]


class RefusedError(ValueError):
    """A parameter is wrong; the text says which and what it may be."""


def series_of(context: Context) -> Handler:
    """The handler of the chart's route."""

    def points(live: LiveRun, query: dict[str, str]) -> dict[str, Any]:
        have = query.get("have", "")
        match = _HAVE.fullmatch(have)
        if have and match is None:
            raise RefusedError("`have` is the key of an earlier answer and its step.")
        return answer(live, (match[1], int(match[2])) if match else None)

    return _handler(context, points)


def parts_of(context: Context) -> Handler:
    """The handler of the route of the page's parts."""

    def parts(live: LiveRun, query: dict[str, str]) -> dict[str, Any]:
        tab, shown = query.get("tab", ""), query.get("shown", "")
        if tab not in TABS or not _SHOWN.fullmatch(shown):
            raise RefusedError("`tab` is one of the run's page, `shown` has checksums of its parts.")
        return {"parts": run_page.changed(live, tab, shown.split(".")), "alive": not live.state().ended}

    return _handler(context, parts)


def _handler(context: Context, answer_of: Callable[[LiveRun, dict[str, str]], dict[str, Any]]) -> Handler:
    def handler(name: str, request: Request) -> Response:
        try:
            run = context.workspace.run(name)
        except OSError:  # a name that no file can have
            run = None
        if run is None:
            return _plain(404, "There is no such run.")
        try:
            body = answer_of(context.lives.of(run), dict(request.query_params))
        except RefusedError as error:
            return _plain(400, str(error))
        except (FinetuneError, OSError, ValueError, KeyError):
            return _plain(404, "This run's files can't be read.")
        text = json.dumps(body, separators=(",", ":"), allow_nan=False)
        return Response(text, media_type="application/json", headers={"cache-control": "no-store"})

    return handler


def _plain(status: int, text: str) -> Response:
    return Response(text, status_code=status, media_type="text/plain; charset=utf-8", headers={"cache-control": "no-store"})
