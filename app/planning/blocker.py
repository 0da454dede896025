"""Reasons that keep a run from starting, known before anybody presses Start."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from finetune.card.device_selection import cards_here
from finetune.card.find import find_card
from finetune.data.sources import find_sources
from finetune.errors import DataError, FinetuneError
from finetune.planner.plan import Plan
from finetune.settings import AUTO, Recipe

from ..language import mark, tr_n
from ..views.words import in_words

#: A setting that a fix names, with the quotes that a shell needs.
_SETTING = re.compile(r"'dataset\.\w+=[^']*'|\bdataset\.\w+=[^\s']+")


@dataclass(frozen=True)
class Blocker:
    """Why a run would not start, and the fix; `override` removes the reason, on a button with `label`.

    `elsewhere`: it would on another machine, for which this is planned.
    """

    title: str
    problems: list[str]
    fix: str = ""
    label: str = ""
    override: str = ""
    elsewhere: bool = False


def blocker_of(recipe: Recipe, plan: Plan, folder: Path) -> Blocker | None:
    """The first reason why a run of this plan would not start on this machine; None when none is known.

    `folder`: where relative paths of the recipe start; the page's own process is elsewhere.
    """
    if plan.data_problem:
        problems, fix = list(plan.data_problem.problems), plan.data_problem.fix
        setting = _SETTING.search(fix)
        override = setting[0] if setting else ""
        return Blocker(DataError.title, problems, fix, _label(override, problems), override)
    if plan.data is None:
        try:
            for path in [recipe.dataset.path] if isinstance(recipe.dataset.path, str) else recipe.dataset.path:
                _require_data(path, folder, only_split=recipe.dataset.split is not None)
        except DataError as error:
            return Blocker(error.title, error.problems, error.fix.replace(str(Path.cwd()), str(folder)))
    if plan.card.problem:
        return Blocker(mark("No run can use this GPU now"), [plan.card.problem], plan.card.problem_fix)
    try:
        find_card(recipe.gpu, here=True, processes=recipe.launch.processes_here)
    except FinetuneError as error:
        here = bool(cards_here()) and recipe.gpu != AUTO
        label, override = (in_words(f"gpu={AUTO}"), f"gpu={AUTO}") if here else ("", "")
        return Blocker(error.title, error.problems, error.fix, label, override, elsewhere=True)
    return None


def _require_data(path: str, folder: Path, *, only_split: bool) -> None:
    """Raise DataError for a path that is neither a file or folder from `folder` on, nor bundled, nor an id on the hub.

    Patterns are left to the run.
    """
    if not (folder / path).exists() and not set("*?[") & set(path):
        find_sources(path, only_split=only_split)


def _label(override: str, problems: list[str]) -> str:
    rows = re.match(r"([\d,]+) ", problems[0])
    if override == "dataset.on_bad_rows=skip" and rows:
        return tr_n("Leave out {n} row", "Leave out {n} rows", int(rows[1].replace(",", "")))
    return in_words(override) if override else ""
