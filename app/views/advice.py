"""What single settings did to the results of runs, as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from finetune.evaluate.run_advice import RunAdvice, SettingEffect

from ..language import tr
from .compare import value_text
from .engine_texts import of_engine
from .markup import interval_text, note, table
from .words import setting_name


def what_settings_did(groups: Sequence[RunAdvice]) -> str:
    """For each group of runs on the same rows a table of its settings that changed alone; empty where there are none."""
    return "".join(_group(group) for group in groups if group.effects or group.never_alone)


def _group(group: RunAdvice) -> str:
    columns = [
        tr("Setting"),
        tr("Values"),
        tr("Score"),
        ">" + tr("First"),
        ">" + tr("Second"),
        tr("Change (95 % interval)"),
        "",
    ]
    rows = [_row(group, effect) for effect in group.effects]
    shown = table(columns, rows, tr("What single settings changed")) if rows else ""
    if group.noise is not None:
        text = tr(
            "Another seed alone changes the held-out loss by up to {loss}: less than that says nothing.",
            loss=f"{group.noise:.4f}",
        )
        shown += note(text)
    if group.never_alone:
        names = ", ".join(setting_name(name) for name in group.never_alone)
        shown += note(tr("Never changed alone, so nothing can be said of: {settings}", settings=names))
    if group.effects and all(effect.difference is None for effect in group.effects):
        shown += note(tr("For an interval, evaluate these runs on their held-out rows."))
    return shown


def _row(group: RunAdvice, effect: SettingEffect) -> list[Any]:
    gap = effect.difference
    change = f"{effect.change:+.4f}" if gap is None else f"{gap.value:+.4f} ({interval_text(gap.low, gap.high)})"
    verdict = tr("can't tell yet") if group.is_noise(effect) else tr("moves it") if gap else ""
    first, second = effect.values
    scores = (f"{score:.4f}" for score in effect.scores)
    values = f"{value_text(first)} → {value_text(second)}"
    return [setting_name(effect.setting), values, of_engine(effect.score), *scores, change, verdict]
