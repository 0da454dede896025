"""Pages whose parts a browser follows, answers to their messages, and the state that all pages share."""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import Response

from finetune.errors import FinetuneError

from ..background import Queue, Tasks
from ..chats import Chats
from ..live import LiveRuns
from ..planning.draft import Draft
from ..views.markup import WRONG_MESSAGE, Safe, refusal, render, stamp_of
from ..worker import Worker
from ..workspace import Workspace

#: Seconds of silence after which the planner is killed.
_SILENT_S = 300.0


class Context:
    """State of one app."""

    def __init__(self, workspace: Workspace, temporary: Path) -> None:
        self.workspace, self._temporary = workspace, temporary
        #: Folder of browser uploads.
        self.uploads = temporary / "files"
        self.lives = LiveRuns()
        self.draft = Draft(workspace)
        log = workspace.folder("planner") / "log.txt"
        self.planner = Worker(workspace, ".planning.process", log=log, silent_s=_SILENT_S)
        self.queue = Queue(workspace)
        self.chats = Chats(workspace)
        self.tasks = Tasks(workspace)

    def close(self) -> None:
        # runs and the queue are other processes, and continue
        self.planner.close()
        self.chats.close()
        # uploads that no recipe and no message has taken
        shutil.rmtree(self._temporary, ignore_errors=True)


class RefusedError(ValueError):
    """Wrong parameter, with its allowed values."""


class FollowedPage(ABC):
    """A page whose parts `parts.js` fetches."""

    name: str
    part_names: tuple[str, ...]
    #: Interval of the browser's requests for changed parts, from /ft/page/`name`.
    every_ms = 2000
    #: CSS class of each part.
    css = ""

    def __init__(self, context: Context) -> None:
        self.context = context

    def html(self, query: Mapping[str, str]) -> str:
        return render("page", page=self, before=Safe(self.before()), parts=dict.fromkeys(self.part_names, ""))

    def before(self) -> str:
        # HTML before the parts, fixed while the page is open
        return ""

    @abstractmethod
    def parts(self) -> dict[str, str]:
        """Return the HTML of each part."""

    def act(self, message: Mapping[str, Any]) -> dict[str, str]:
        """Handle a button. Raises the errors that `attempted` handles."""
        raise KeyError(message)

    def add_routes(self, api: Any) -> None:
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
    """Return stamp and HTML of each part whose stamp is not in `shown`."""
    stamped = {name: (stamp_of(name, html), html) for name, html in parts.items()}
    return {name: pair for name, pair in stamped.items() if pair[0] not in shown.split(".")}


def attempted(act: Callable[[Mapping[str, Any]], dict[str, str] | None], message: Mapping[str, Any]) -> dict[str, str]:
    """Return the answer to a message; `said` explains an error."""
    try:
        return {"said": ""} | (act(message) or {})
    except (FinetuneError, OSError, *WRONG_MESSAGE) as error:
        return {"said": refusal(error)}


def answered(context: Context, name: str, answer_of: Callable[[Any], Any], *, sweeps: bool = False) -> Response:
    """Return the answer about a run: 404 no run, 400 wrong parameter, 409 damaged files."""
    try:
        run = context.workspace.run(name) or (context.workspace.sweep(name) if sweeps else None)
    except OSError:  # a name that no file system allows
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
    """Return uncached JSON."""
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    return Response(text, media_type="application/json", headers=_NO_STORE)


_NO_STORE = {"cache-control": "no-store"}


def _plain(status: int, text: str) -> Response:
    return Response(text, status_code=status, media_type="text/plain; charset=utf-8", headers=_NO_STORE)
