"""Settings: theme, language, hub login, machine check."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..background import Task
from ..language import LANGUAGES, current, tr
from ..views.markup import render
from ..views.words import day
from ..web.followed import Context, FollowedPage


class SettingsPage(FollowedPage):
    """Page of settings."""

    # theme and language live in the browser
    name, part_names, every_ms, css = "settings", ("machine",), 1000, "ft-box"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._doctor = Task(context.workspace.folder("doctor"))

    def before(self) -> str:
        return render("own_settings", languages=LANGUAGES, current=current(), token_from=_token_from())

    def parts(self) -> dict[str, str]:
        status = self._doctor.status()
        if status is None or status["state"] == "running":
            return {"machine": render("machine", findings=None, is_running=status is not None)}
        silent = [{"check": "doctor", "state": "fail", "what": f"gave no answer: {self._doctor.output()[-400:]}", "fix": ""}]
        moment = time.localtime(status["began_s"])
        return {
            "machine": render(
                "machine", findings=(self._doctor.result() or {}).get("findings", silent), is_running=False,
                time=f"{day(moment)} {time.strftime('%H:%M', moment)}",
            )
        }  # fmt: skip

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
