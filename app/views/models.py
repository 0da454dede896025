"""Base models to choose from as HTML, each with whether it fits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from finetune.planner.plan import Verdict
from finetune.units import format_count, gib

from ..planning.catalogue import Model
from .markup import inert


def chooser() -> str:
    """Search, and a box for any other model."""
    return (
        '<div class="ft-runs-head"><h1 class="ft-title" data-title="Model">Model</h1>'
        '<form class="ft-pick" data-form="search" role="search"><input type="search" name="value" maxlength="100" '
        'aria-label="Search Hugging Face" placeholder="Search Hugging Face"><button class="ft-act">Search</button></form>'
        '<form class="ft-pick" data-form="model"><input name="value" maxlength="200" aria-label="Model: an id or a folder" '
        'placeholder="OWNER/NAME or a folder"><button class="ft-act">Use it</button></form></div>'
    )


def model_list(models: Sequence[Model], chosen: str, badges: Mapping[str, Mapping[str, Any]]) -> str:
    """The models as buttons; the chosen one is marked. `badges` has the verdicts that are there."""
    rows = "".join(_model(model, badges.get(model.name), is_chosen=model.name == chosen) for model in models)
    checked = sum(model.name in badges for model in models)
    progress = f"{checked} of {len(models)} checked" if checked < len(models) else ""
    return (
        f'<section class="ft-box ft-models"><div class="ft-boxhead"><h2>Which model is to learn?</h2>'
        f'<small role="status">{progress}</small>'
        f'</div><ul>{rows}</ul></section><p class="ft-next"><a class="ft-button primary" href="/data">Next: Data</a></p>'
    )


def _model(model: Model, badge: Mapping[str, Any] | None, *, is_chosen: bool) -> str:
    parameters = model.parameters or (badge or {}).get("parameters")
    facts = [f"{format_count(parameters)} parameters" if parameters else "", model.source, model.licence or ""]
    act = inert(json.dumps({"model": model.name}))
    return (
        f'<li><button type="button" data-act="{act}" data-key="{inert(model.name)}" aria-pressed="{str(is_chosen).lower()}">'
        f"<b>{inert(model.name)}</b><small>{inert(' · '.join(filter(None, facts)))}</small>{_badge(badge)}</button></li>"
    )


def _badge(badge: Mapping[str, Any] | None) -> str:
    if badge is None:
        return '<span class="ft-badge" aria-label="being checked">…</span>'
    verdict = Verdict(badge["verdict"])
    if badge.get("because"):
        return f'<span class="ft-badge {verdict.level}" title="{inert(badge["because"], 300)}">Can\'t say yet</span>'
    needs = f" {gib(badge['peak_bytes'])}" if badge.get("peak_bytes") else ""
    bits = f", {badge['bits']}-bit" if badge.get("bits") else ""
    name = {"ok": "Fits:", "bad": "Too big:"}.get(verdict.level, str(badge["verdict"]))
    return f'<span class="ft-badge {verdict.level}">{inert(name)}{needs}{bits}</span>'
