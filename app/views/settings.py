"""The settings of the page as HTML: looks, prices, budget, the hub's login, and what is wrong with this machine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from .markup import action, inert, note

_STATES = {"ok": ("Good", "ok"), "skip": ("Not needed", ""), "warn": ("Look at it", "warn"), "fail": ("Broken", "bad")}


def choices(price: float, budget: str, token_from: str) -> str:
    """Theme, price, memory budget and login."""
    themes = "".join(f'<option value="{value}">{name}</option>' for value, name in _THEMES.items())
    login = (
        f"Logged in: the token is from {inert(token_from)}."
        if token_from
        else "Not logged in. Models that ask for consent, and pushing, need <code>hf auth login</code> in a terminal."
    )
    forms = _form("price", "Price of an hour", f"{price:g}" if price else "", "0", "Fit shows what a run costs.")
    hint = "Of the recipe that is being made; empty: all that is free."
    forms += _form("budget", "Most GPU memory to use", budget, "20GiB", hint)
    return (
        '<h1 class="ft-title" data-title="Settings">Settings</h1><section class="ft-box ft-settings">'
        f'<label class="ft-field">Theme <select data-theme-choice>{themes}</select></label>{forms}'
        f"<p><b>Hugging Face</b> {login}</p></section>"
    )


_THEMES = {"": "As the system", "light": "Light", "dark": "Dark"}


def _form(name: str, label: str, value: str, example: str, hint: str) -> str:
    return (
        f'<form class="ft-pick" data-form="{name}"><label for="set-{name}">{label}</label><input id="set-{name}" name="value" '
        f'value="{inert(value)}" placeholder="{example}" maxlength="20" autocomplete="off"><button class="ft-act">Save</button>'
        f"<small>{hint}</small></form>"
    )


def examined(answer: Mapping[str, Any] | None, *, is_running: bool) -> str:
    """What `finetune doctor` found, what is wrong first; and the button that asks it."""
    button = f"<button type='button' class='ft-act' {action(examine=True)} data-key='examine'>Examine this machine</button>"
    if is_running:
        button = '<span class="ft-note" role="status"><span class="ft-busy"></span> examining, about 10 s</span>'
    head = f'<div class="ft-boxhead"><h2>This machine</h2>{button}</div>'
    if answer is None:
        return f"{head}{note('Packages, driver, GPU, disk, the hub: each part that a run needs, with what to do.')}"
    order = list(reversed(_STATES))
    findings = sorted(answer["findings"], key=lambda finding: order.index(finding["state"]))
    lines = "".join(map(_finding, findings))
    when = time.strftime("%d %b %H:%M", time.localtime(answer["time_s"]))
    return f'{head}<p class="ft-note">As of {when}.</p><ul class="ft-findings">{lines}</ul>'


def _finding(finding: Mapping[str, Any]) -> str:
    name, css = _STATES[finding["state"]]
    fix = f"<small>{inert(finding['fix'])}</small>" if finding.get("fix") else ""
    return (
        f'<li><span class="ft-badge {css}">{name}</span><b>{inert(finding["check"])}</b>'
        f"<span>{inert(finding['what'])}{fix}</span></li>"
    )
