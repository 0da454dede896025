"""Settings: theme, price of an hour, memory budget, the hub's login, and an examination of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gradio as gr

from finetune.errors import FinetuneError, RecipeError

from ..background.tasks import Task
from ..context import Context
from ..language import tr
from ..views import settings as settings_views
from ..views.binding import QUIET, change_trigger, fingerprint, show
from ..views.markup import note
from ..views.problems import problem, settings_problem
from ..views.recipe_form import as_settings, fields

_TICK_S = 1.0
#: The page's forms -> the setting of the recipe that is being made.
_SETTINGS = {"price": "price_per_hour", "budget": "memory_budget"}


def build(context: Context, page: gr.Blocks) -> None:
    """Components and their handlers."""
    view = _View(context)
    act = gr.Textbox(visible="hidden", elem_id="settings-act")
    chosen = show(lambda: settings_views.choices("", "", ""), elem_id="settings-choices")
    status = show(elem_id="settings-status")
    with gr.Column(elem_classes="ft-box"):
        examined = show(lambda: settings_views.examined(None, is_running=False), elem_id="settings-machine")
    changed = change_trigger()
    page.load(view.choices, None, chosen, **QUIET)
    page.load(view.tick, None, changed, **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, None, changed, **QUIET)
    changed.change(view.examined, None, examined, **QUIET)
    act.change(view.act, act, [status, changed], **QUIET)


class _View:
    def __init__(self, context: Context) -> None:
        self.context, self._doctor = context, Task(context.workspace.folder("doctor"))

    def choices(self) -> str:
        values = self.context.draft.read().values
        price, budget = (str(values.get(setting) or "") for setting in _SETTINGS.values())
        return settings_views.choices(price, "" if budget == "auto" else budget, _token_from())

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
            if action.get("examine"):
                if self._doctor.is_running:
                    return [gr.skip(), gr.skip()]
                self.context.tasks.begin(self._doctor, "doctor", "--json")
                status = ""
            else:
                (name, text), *_ = action.items()
                status = self._set(_SETTINGS[name], str(text).strip())
        except (ValueError, KeyError, AttributeError, TypeError):  # no message of this page
            return [gr.skip(), gr.skip()]
        except FinetuneError as error:
            status = problem(error.title, error.problems, error.fix)
        return [status, self.tick()]

    def _set(self, setting: str, text: str) -> str:
        field = next(field for field in fields() if field.name == setting)
        try:
            self.context.draft.change(**as_settings(field, text.replace(",", ".")))
        except RecipeError as error:
            return settings_problem(error.problems, error.fix)
        return note(tr("Saved."), "ok")


def _token_from() -> str:
    """Where the hub's token is from; empty without one. The token itself is never read into the page."""
    from huggingface_hub import constants

    if os.environ.get("HF_TOKEN"):
        return tr("the environment")
    return tr("a file of this user") if Path(constants.HF_TOKEN_PATH).is_file() else ""
