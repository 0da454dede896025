"""Reasons that keep a run from starting."""

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

#: A setting in a fix, with shell quotes.
_SETTING = re.compile(r"'dataset\.\w+=[^']*'|\bdataset\.\w+=[^\s']+")


@dataclass(frozen=True)
class Blocker:
    """Reason that keeps a run from starting."""

    title: str
    problems: list[str]
    fix: str = ""
    #: A button with `label` applies `override`.
    label: str = ""
    override: str = ""
    #: The plan is for another machine.
    elsewhere: bool = False


def blocker_of(recipe: Recipe, plan: Plan, folder: Path) -> Blocker | None:
    """Return the first reason against a start on this machine. `folder`: base of relative paths."""
    if plan.data_problem:
        problems, fix = list(plan.data_problem.problems), plan.data_problem.fix
        setting = _SETTING.search(fix)
        override = setting[0] if setting else ""
        return Blocker(DataError.title, problems, fix, _label(override, problems), override)
    if plan.data is None:
        try:
            for path in [recipe.dataset.path] if isinstance(recipe.dataset.path, str) else recipe.dataset.path:
                # patterns are left to the run
                if not (folder / path).exists() and not set("*?[") & set(path):
                    find_sources(path, recipe.dataset, split=recipe.dataset.split)
        except DataError as error:
            # the page's process has another working folder
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


def _label(override: str, problems: list[str]) -> str:
    rows = re.match(r"([\d,]+) ", problems[0])
    if override == "dataset.on_bad_rows=skip" and rows:
        return tr_n("Leave out {n} row", "Leave out {n} rows", int(rows[1].replace(",", "")))
    return in_words(override) if override else ""
