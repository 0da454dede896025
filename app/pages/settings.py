"""Settings: theme, language, the hub's login, and a check of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gradio as gr

from finetune.errors import FinetuneError

from ..background.tasks import Task
from ..context import Context
from ..language import tr
from ..views import settings as settings_views
from ..views.binding import QUIET, change_trigger, fingerprint, show
from ..views.problems import problem

_TICK_S = 1.0


def build(context: Context, page: gr.Blocks) -> None:
    """Components and their handlers."""
    view = _View(context)
    act = gr.Textbox(visible="hidden", elem_id="settings-act")
    show(lambda: settings_views.choices(_token_from()), elem_id="settings-choices")
    status = show(elem_id="settings-status")
    with gr.Column(elem_classes="ft-box"):
        examined = show(lambda: settings_views.examined(None, is_running=False), elem_id="settings-machine")
    changed = change_trigger()
    page.load(view.tick, None, changed, **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, None, changed, **QUIET)
    changed.change(view.examined, None, examined, **QUIET)
    act.change(view.act, act, [status, changed], **QUIET)


class _View:
    def __init__(self, context: Context) -> None:
        self.context, self._doctor = context, Task(context.workspace.folder("doctor"))

    def tick(self) -> str:
        return fingerprint(self.examined())

    def examined(self) -> str:
        """The last examination, and whether there is one going on."""
        status = self._doctor.status()
        if status is None or status["state"] == "running":
            return settings_views.examined(None, is_running=status is not None)
        silent = [{"check": "doctor", "state": "fail", "what": f"gave no answer: {self._doctor.log()[-400:]}", "fix": ""}]
        findings = (self._doctor.result() or {}).get("findings", silent)
        return settings_views.examined({"findings": findings, "time_s": status["began_s"]}, is_running=False)

    def act(self, message: str) -> list[Any]:
        try:
            action = json.loads(message)
            if not action.get("examine") or self._doctor.is_running:
                return [gr.skip(), gr.skip()]
            self.context.tasks.begin(self._doctor, "doctor", "--json")
            status = ""
        except (ValueError, AttributeError):  # no message of this page
            return [gr.skip(), gr.skip()]
        except FinetuneError as error:
            status = problem(error.title, error.problems, error.fix)
        return [status, self.tick()]


def _token_from() -> str:
    """Where the hub's token is from; empty without one. The token itself is never read into the page."""
    from huggingface_hub import constants

    if os.environ.get("HF_TOKEN"):
        return tr("the environment")
    return tr("a file of this user") if Path(constants.HF_TOKEN_PATH).is_file() else ""
