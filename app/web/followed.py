"""Pages whose parts a browser follows (`parts.js`), and answers to their buttons and forms."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Response

from finetune.errors import FinetuneError

from ..context import Context
from ..views.markup import Safe, stamp_of
from ..views.problems import WRONG_MESSAGE, refusal
from ..views.templates import render


class RefusedError(ValueError):
    """A parameter is wrong; the text names it and its allowed values."""


class FollowedPage(ABC):
    """A page whose changed parts the browser fetches every `every_ms` from /ft/page/ and `name`. `css`: class of each part."""

    name: str
    part_names: tuple[str, ...]
    every_ms = 2000
    css = ""

    def __init__(self, context: Context) -> None:
        self.context = context

    def html(self, query: Mapping[str, str]) -> str:
        """HTML of the page when it is opened; the browser fetches the parts. `query`: parameters of the address."""
        return render("page", page=self, before=Safe(self.before()), parts=dict.fromkeys(self.part_names, ""))

    def before(self) -> str:
        """HTML before the parts, which never changes."""
        return ""

    @abstractmethod
    def parts(self) -> dict[str, str]:
        """The HTML of each part."""

    def act(self, message: Mapping[str, Any]) -> dict[str, str]:
        """Handle a button; return the message to show as `said`, and other new parts. Raises what `attempted` expects."""
        raise KeyError(message)

    def add_routes(self, api: Any) -> None:
        """The routes that parts.js asks."""

        @api.get(f"/ft/page/{self.name}")
        def changed(shown: str = "") -> Response:
            try:
                return as_json({"parts": changed_parts(self.parts(), shown)})
            except (FinetuneError, OSError, *WRONG_MESSAGE) as error:
                return _plain(409, f"This page's files can't be read: {error}")

        @api.post(f"/ft/page/{self.name}")
        def act(message: dict[str, Any]) -> Response:
            return as_json(attempted(self.act, message))


def changed_parts(parts: Mapping[str, str], shown: str) -> dict[str, tuple[str, str]]:
    """Stamp and HTML of each changed part. `shown`: the stamps that the browser has, separated by dots."""
    stamped = {name: (stamp_of(name, html), html) for name, html in parts.items()}
    return {name: pair for name, pair in stamped.items() if pair[0] not in shown.split(".")}


def attempted(act: Callable[[Mapping[str, Any]], dict[str, str] | None], message: Mapping[str, Any]) -> dict[str, str]:
    """The answer to a message. `said` names what went wrong, a full disk among others."""
    try:
        return {"said": ""} | (act(message) or {})
    except (FinetuneError, OSError, *WRONG_MESSAGE) as error:
        return {"said": refusal(error)}


def answered(context: Context, name: str, answer_of: Callable[[Any], Any], *, sweeps: bool = False) -> Response:
    """The answer about a run or a sweep; 404 without one, 400 for a wrong parameter, 409 for damaged files."""
    try:
        run = context.workspace.run(name) or (context.workspace.sweep(name) if sweeps else None)
    except OSError:  # a name that no file can have
        run = None
    if run is None:
        return _plain(404, "There is no such run.")
    try:
        return as_json(answer_of(run))
    except RefusedError as error:
        return _plain(400, str(error))
    except (FinetuneError, OSError, ValueError, KeyError):
        return _plain(409, "This run's files can't be read.")


def as_json(body: Any) -> Response:
    """A JSON answer that no browser keeps."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    return Response(text, media_type="application/json", headers=_NO_STORE)


_NO_STORE = {"cache-control": "no-store"}


def _plain(status: int, text: str) -> Response:
    return Response(text, status_code=status, media_type="text/plain; charset=utf-8", headers=_NO_STORE)
