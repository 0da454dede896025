"""The settings of the page as HTML: looks, the hub's login, and what is wrong with this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from ..language import LANGUAGES, current, mark, tr
from .markup import action, inert, note
from .words import day

_STATES = {
    "ok": (mark("Good"), "ok"), "skip": (mark("Not needed"), ""), "warn": (mark("Look at it"), "warn"),
    "fail": (mark("Broken"), "bad"),
}  # fmt: skip
#: The checks of `finetune doctor`; others are shown by their own names.
_CHECKS = (
    mark("packages"), mark("driver"), mark("card memory"), mark("architecture"), mark("compiler"), mark("host memory"),
    mark("disk"), mark("hub"), mark("hub login"), mark("spill"), mark("port"),
)  # fmt: skip


def choices(token_from: str) -> str:
    """Theme, language and login."""
    themes = "".join(f'<option value="{value}">{tr(name)}</option>' for value, name in _THEMES.items())
    languages = "".join(
        f'<option value="{code}"{" selected" if code == current() else ""}>{name}</option>' for code, name in LANGUAGES.items()
    )
    login = (
        tr("Logged in: the token is from {source}.", source=inert(token_from))
        if token_from
        else tr("Not logged in. Models that ask for consent, and pushing, need {command} in a terminal.", command=_LOGIN)
    )
    return (
        f'<h1 class="ft-title" data-title="{tr("Settings")}">{tr("Settings")}</h1><section class="ft-box ft-settings">'
        f'<label class="ft-field">{tr("Theme")} <select data-theme-choice>{themes}</select></label>'
        f'<label class="ft-field">{tr("Language")} <select data-language-choice>{languages}</select></label>'
        f"<p><b>Hugging Face</b> {login}</p></section>"
    )


_LOGIN = "<code>hf auth login</code>"
_THEMES = {"": mark("System"), "light": mark("Light"), "dark": mark("Dark")}


def examined(answer: Mapping[str, Any] | None, *, is_running: bool) -> str:
    """What `finetune doctor` found, what is wrong first; and the button that asks it."""
    button = (
        f"<button type='button' class='ft-act' {action(examine=True)} data-key='examine'>{tr('Check this machine')}</button>"
    )
    if is_running:
        button = f'<span class="ft-note" role="status"><span class="ft-busy"></span> {tr("examining, about 10 s")}</span>'
    head = f'<div class="ft-boxhead"><h2>{tr("This machine")}</h2>{button}</div>'
    if answer is None:
        return f"{head}{note(tr('Packages, driver, GPU, disk, the hub: each part that a run needs, with what to do.'))}"
    order = list(reversed(_STATES))
    findings = sorted(answer["findings"], key=lambda finding: order.index(finding["state"]))
    lines = "".join(map(_finding, findings))
    when = f"{day(time.localtime(answer['time_s']))} {time.strftime('%H:%M', time.localtime(answer['time_s']))}"
    return f'{head}<p class="ft-note">{tr("As of {time}.", time=when)}</p><ul class="ft-findings">{lines}</ul>'


def _finding(finding: Mapping[str, Any]) -> str:
    name, css = _STATES[finding["state"]]
    check = tr(finding["check"]) if finding["check"] in _CHECKS else finding["check"]
    fix = f"<small>{inert(finding['fix'])}</small>" if finding.get("fix") else ""
    return (
        f'<li><span class="ft-badge {css}">{tr(name)}</span><b>{inert(check)}</b>'
        f"<span>{inert(finding['what'])}{fix}</span></li>"
    )
