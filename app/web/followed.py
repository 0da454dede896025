"""Answers about one run, as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from fastapi import Response

from finetune.errors import FinetuneError

from ..context import Context

_NO_STORE = {"cache-control": "no-store"}


class RefusedError(ValueError):
    """A parameter is wrong; the text names it and its allowed values."""


def answered(context: Context, name: str, answer_of: Callable[[Any], Any], *, sweeps: bool = False) -> Response:
    """The answer about a run or a sweep; 404 without one, 400 for a wrong parameter, 409 for damaged files."""
    try:
        run = context.workspace.run(name) or (context.workspace.sweep(name) if sweeps else None)
    except OSError:  # a name that no file can have
        run = None
    if run is None:
        return _plain(404, "There is no such run.")
    try:
        body = answer_of(run)
    except RefusedError as error:
        return _plain(400, str(error))
    except (FinetuneError, OSError, ValueError, KeyError):
        return _plain(409, "This run's files can't be read.")
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    return Response(text, media_type="application/json", headers=_NO_STORE)


def _plain(status: int, text: str) -> Response:
    return Response(text, status_code=status, media_type="text/plain; charset=utf-8", headers=_NO_STORE)
