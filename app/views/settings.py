"""Page settings as HTML: looks, hub login, machine check."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..language import LANGUAGES, current, mark, tr
from .markup import Safe, inert
from .templates import render
from .words import day

_STATES = {
    "ok": (mark("Good"), "ok"), "skip": (mark("Not needed"), ""), "warn": (mark("Look at it"), "warn"),
    "fail": (mark("Broken"), "bad"),
}  # fmt: skip
#: Translated names of `finetune doctor` checks.
_CHECKS = (
    mark("packages"), mark("driver"), mark("card memory"), mark("architecture"), mark("compiler"), mark("host memory"),
    mark("disk"), mark("hub"), mark("hub login"), mark("spill"), mark("port"),
)  # fmt: skip


_THEMES = {"": mark("System"), "light": mark("Light"), "dark": mark("Dark")}
_LOGIN = "<code>hf auth login</code>"


def choices(token_from: str) -> str:
    """Return theme, language and login."""
    login = tr("Not logged in. Models that ask for consent, and pushing, need {command} in a terminal.", command=_LOGIN)
    if token_from:
        login = tr("Logged in: the token is from {source}.", source=inert(token_from))
    return render("own_settings", themes=_THEMES, languages=LANGUAGES, current=current(), login=Safe(login))


def examined(answer: Mapping[str, Any] | None, *, is_running: bool) -> str:
    """Return findings of `finetune doctor`, errors first, and the button that runs the check."""
    order = list(reversed(_STATES))
    findings = sorted(answer["findings"] if answer else (), key=lambda finding: order.index(finding["state"]))
    moment = time.localtime(answer["time_s"]) if answer else None
    when = f"{day(moment)} {time.strftime('%H:%M', moment)}" if moment else ""
    return render("machine", findings=findings, time=when, is_running=is_running, states=_STATES, checks=_CHECKS)
