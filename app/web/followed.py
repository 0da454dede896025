"""Pages that a browser refreshes in parts, answers to their messages, and shared state."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.responses import PlainTextResponse

from finetune.errors import CommandError, FinetuneError
from finetune.run.directory import RunDirectory

from ..chats import Chats
from ..draft import Draft
from ..language import tr
from ..live import LiveRuns
from ..views.markup import Safe, inert, problem_of, stamp_of
from ..worker import Worker
from ..workspace import Workspace

_SILENT_S = 300.0  # then the planner process is killed


class Context:
    """State that all pages share, and its processes."""

    def __init__(self, workspace: Workspace, temporary: Path) -> None:
        self.workspace, self._temporary = workspace, temporary
        #: Folder of browser uploads.
        self.uploads = temporary / "files"
        self.lives = LiveRuns()
        self.draft = Draft(workspace)
        log = workspace.folder("planner") / "log.txt"
        self.planner = Worker(workspace.root, ".planning", log=log, silent_s=_SILENT_S)
        self.chats = Chats(workspace)

    def uploaded(self, path: str) -> Path:
        """Return the path of an upload. Raises CommandError."""
        source = Path(path).resolve()
        # a forged request must not read or move other files
        if not source.is_relative_to(self.uploads.resolve()):
            raise CommandError("this file was not uploaded here")
        return source

    def close(self) -> None:
        # runs and starts are other processes, and continue
        self.planner.close()
        self.chats.close()
        # uploads that no recipe and no message has taken
        shutil.rmtree(self._temporary, ignore_errors=True)


class FollowedPage(ABC):
    """A page whose parts `parts.js` keeps up to date."""

    #: Last part of the address, /ft/page/NAME.
    name: str

    def __init__(self, context: Context) -> None:
        self.context = context

    @abstractmethod
    def parts(self) -> dict[str, str]:
        """Return the HTML of each part."""

    def act(self, message: Mapping[str, Any]) -> dict[str, str]:
        """Handle a button's message; return HTML by part. Raises KeyError for an unknown message."""
        raise KeyError(message)

    def changed(self, shown: str = "") -> dict[str, Any]:
        return {"parts": changed_parts(self.parts(), shown)}

    def answer(self, message: Mapping[str, Any]) -> dict[str, str]:
        return attempted(self.act, message)

    def add_routes(self, api: Any) -> None:
        api.get(f"/ft/page/{self.name}")(self.changed)
        api.post(f"/ft/page/{self.name}")(self.answer)


def changed_parts(parts: Mapping[str, str], shown: str) -> dict[str, tuple[str, str]]:
    """Return stamp and HTML of changed parts. `shown`: the browser's stamps, joined by dots."""
    stamped = {name: (stamp_of(name, html), html) for name, html in parts.items()}
    return {name: pair for name, pair in stamped.items() if pair[0] not in shown.split(".")}


def attempted(act: Callable[[Mapping[str, Any]], dict[str, str]], message: Mapping[str, Any]) -> dict[str, str]:
    """Return the answer to a message; `said` explains an error."""
    try:
        return {"said": ""} | act(message)
    except (FinetuneError, OSError, UnicodeError) as error:
        return {"said": problem_of(error)}


def duplicate(context: Context, run: RunDirectory) -> Safe:
    """Make a run's recipe the draft; return the note after which the browser opens New run."""
    context.draft.write(run.recipe.read_text(encoding="utf-8"))
    text = tr("Opening New run with this run's recipe.")
    return Safe(f'<p class="ft-note" data-go="/" role="status">{inert(text)}</p>')


def explain_errors(api: Any) -> None:
    """Let the routes of `api` answer errors with a sentence."""

    def explained(_: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            return PlainTextResponse(error.detail, error.status_code)
        return PlainTextResponse(f"These files can't be read: {error}", 409)

    for kind in (HTTPException, FinetuneError, OSError):
        api.add_exception_handler(kind, explained)
