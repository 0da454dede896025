"""Models as HTML: base models to choose from, each with whether it fits, and what runs have made, with what is served now."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from finetune.planner.plan import Verdict
from finetune.run.directory import RunDirectory
from finetune.units import format_bytes, format_count, gib

from ..language import mark, tr
from ..planning.catalogue import Model
from .markup import Safe, as_on_page, inert, page_title, table
from .words import capital


def chooser() -> str:
    """Search, and a box for any other model."""
    hub, any_model = tr("Search Hugging Face"), tr("Model: an id or a folder")
    return (
        f'<div class="ft-runs-head">{page_title("Model")}'
        '<form class="ft-pick" data-form="search" role="search"><input type="search" name="value" maxlength="100" '
        f'aria-label="{hub}" placeholder="{hub}"><button class="ft-act">{tr("Search")}</button></form>'
        f'<form class="ft-pick" data-form="model"><input name="value" maxlength="200" aria-label="{any_model}" '
        f'placeholder="{tr("OWNER/NAME or a folder")}"><button class="ft-act">{tr("Use it")}</button></form></div>'
    )


def model_list(models: Sequence[Model], chosen: str, badges: Mapping[str, Mapping[str, Any]]) -> str:
    """The models as buttons; the chosen one is marked. `badges` has the verdicts that are there."""
    rows = "".join(_model(model, badges.get(model.name), is_chosen=model.name == chosen) for model in models)
    checked = sum(model.name in badges for model in models)
    progress = tr("{n} of {total} checked", n=checked, total=len(models)) if checked < len(models) else ""
    return (
        f'<section class="ft-box ft-models"><div class="ft-boxhead"><h2>{tr("Which model is to learn?")}</h2>'
        f'<small role="status">{progress}</small>'
        f"</div><ul>{rows}</ul></section>"
        f'<p class="ft-next"><a class="ft-button primary" href="/data">{tr("Next: Data")}</a></p>'
    )


def _model(model: Model, badge: Mapping[str, Any] | None, *, is_chosen: bool) -> str:
    parameters = model.parameters or (badge or {}).get("parameters")
    size = tr("{n} parameters", n=format_count(parameters)) if parameters else ""
    facts = [size, tr(model.source, recipe=model.recipe) if model.source else "", model.licence or ""]
    act = inert(json.dumps({"model": model.name}))
    return (
        f'<li><button type="button" data-act="{act}" data-key="{inert(model.name)}" aria-pressed="{str(is_chosen).lower()}">'
        f"<b>{inert(model.name)}</b><small>{inert(' · '.join(filter(None, facts)))}</small>{_badge(badge)}</button></li>"
    )


def _badge(badge: Mapping[str, Any] | None) -> str:
    if badge is None:
        return f'<span class="ft-badge" aria-label="{tr("being checked")}">…</span>'
    verdict = Verdict(badge["verdict"])
    if badge.get("because"):
        why = inert(as_on_page(badge["because"]), 300)
        return f'<span class="ft-badge {verdict.level}" title="{why}">{capital(tr(verdict))}</span>'
    needs = [gib(badge["peak_bytes"])] if badge.get("peak_bytes") else []
    needs += [tr("{bits}-bit", bits=badge["bits"])] if badge.get("bits") else []
    name = capital(tr(verdict))
    text = tr("{change}: {result}", change=name, result=tr(", ").join(needs)) if needs else name
    return f'<span class="ft-badge {verdict.level}">{inert(text)}</span>'


@dataclass(frozen=True)
class ModelFile:
    """One adapter, merged model or GGUF file of a run."""

    run: str
    base: str
    kind: str
    path: Path
    bytes: int
    score: str = ""


def models_of(run: RunDirectory) -> Iterable[tuple[str, Path, int]]:
    """Kind, path and size of what a run has: its adapter, folders of merged models, GGUF files."""
    if run.adapter.is_dir():
        yield mark("adapter"), run.adapter, _size(run.adapter.rglob("*"))
    for config in sorted(run.path.glob("*/config.json")):
        if any(config.parent.glob("*.safetensors")):
            yield mark("merged model"), config.parent, _size(config.parent.rglob("*"))
    for path in sorted([*run.path.glob("*.gguf"), *run.path.glob("*/*.gguf")]):
        yield "GGUF", path, path.stat().st_size


def models_table(models: Sequence[ModelFile], root: Path) -> str:
    """The models, the newest run's first."""
    title = page_title("Models")
    if not models:
        hint = tr("An adapter shows here when a run has ended; merge and export it on the run's page.")
        return f'{title}<div class="ft-empty"><p>{tr("No models yet.")}</p><p>{hint}</p></div>'
    rows = [
        [
            Safe(f'<a href="/run?run={quote(model.run)}&amp;tab=export">{inert(model.run)}</a>'), model.base, tr(model.kind),
            format_bytes(model.bytes), model.score,
            model.path.relative_to(root).as_posix() if model.path.is_relative_to(root) else str(model.path),
            Safe(f'<a href="/run?run={quote(model.run)}&amp;tab=chat">{tr("Chat")}</a>'),
        ]
        for model in models
    ]  # fmt: skip
    columns = [tr("Run"), tr("Base model"), tr("Kind"), f">{tr('Size')}", f">{tr('Score')}", tr("Where"), tr("Try")]
    return f'{title}<section class="ft-box">{table(columns, rows, tr("Models"), hidden_caption=True)}</section>'


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
