"""Settings: theme, language, hub login, machine check."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..background.tasks import Task
from ..context import Context
from ..language import LANGUAGES, current, mark, tr
from ..views.markup import Safe, inert, render
from ..views.words import day
from ..web.followed import FollowedPage

_STATES = {
    "ok": (mark("OK"), "ok"), "skip": (mark("Not needed"), ""), "warn": (mark("Warning"), "warn"),
    "fail": (mark("Failed"), "bad"),
}  # fmt: skip
#: Translated names of `finetune doctor` checks.
_CHECKS = (
    mark("packages"), mark("driver"), mark("card memory"), mark("architecture"), mark("compiler"), mark("host memory"),
    mark("disk"), mark("hub"), mark("hub login"), mark("spill"), mark("port"),
)  # fmt: skip
_THEMES = {"": mark("System"), "light": mark("Light"), "dark": mark("Dark")}
_LOGIN = "<code>hf auth login</code>"


class SettingsPage(FollowedPage):
    """Page of settings."""

    # theme and language live in the browser
    name, part_names, every_ms, css = "settings", ("machine",), 1000, "ft-box"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._doctor = Task(context.workspace.folder("doctor"))

    def before(self) -> str:
        return choices(_token_from())

    def parts(self) -> dict[str, str]:
        status = self._doctor.status()
        if status is None or status["state"] == "running":
            return {"machine": examined(None, is_running=status is not None)}
        silent = [{"check": "doctor", "state": "fail", "what": f"gave no answer: {self._doctor.log()[-400:]}", "fix": ""}]
        findings = (self._doctor.result() or {}).get("findings", silent)
        return {"machine": examined({"findings": findings, "time_s": status["began_s"]}, is_running=False)}

    def act(self, message: Mapping[str, Any]) -> dict[str, str]:
        if message["examine"] and not self._doctor.is_running:
            self.context.tasks.begin(self._doctor, "doctor", "--json")
        return {}


def _token_from() -> str:
    from huggingface_hub import constants

    # only the source: the token itself must not reach the page
    if os.environ.get("HF_TOKEN"):
        return tr("the environment")
    return tr("a file of this user") if Path(constants.HF_TOKEN_PATH).is_file() else ""


def choices(token_from: str) -> str:
    """Return theme, language and login."""
    login = tr("Not logged in. Gated models and pushing need {command} in a terminal.", command=_LOGIN)
    if token_from:
        login = tr("Logged in with the token from {source}.", source=inert(token_from))
    return render("own_settings", themes=_THEMES, languages=LANGUAGES, current=current(), login=Safe(login))


def examined(answer: Mapping[str, Any] | None, *, is_running: bool) -> str:
    """Return findings of `finetune doctor`, errors first, and the button that runs the check."""
    order = list(reversed(_STATES))
    findings = sorted(answer["findings"] if answer else (), key=lambda finding: order.index(finding["state"]))
    moment = time.localtime(answer["time_s"]) if answer else None
    when = f"{day(moment)} {time.strftime('%H:%M', moment)}" if moment else ""
    return render("machine", findings=findings, time=when, is_running=is_running, states=_STATES, checks=_CHECKS)
