"""New run as HTML: sentence, verdict, plans, settings, panels, and what keeps the run from starting."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from finetune.card.device_selection import cards_here
from finetune.card.find import catalogue_sizes, find_card
from finetune.card.visible import usable_devices
from finetune.data.sources import find_sources
from finetune.errors import DataError, FinetuneError
from finetune.planner.history import read_history
from finetune.planner.plan import Alternative, Plan, ResourceCheck, Verdict
from finetune.recipe import yaml as recipe_yaml
from finetune.settings import AUTO, Recipe
from finetune.settings.reference import Setting, settings_reference
from finetune.settings.schema import GROUPS
from finetune.units import gib

from ..language import mark, tr, tr_n
from ..planning.catalogue import Model, card_label
from ..planning.draft import Edited, as_text
from .markup import Safe, problem, render
from .run import parts_of
from .words import capital, in_words, short_name

#: Roles of data columns, by field of `dataset.columns`.
ROLES = {
    "instruction": mark("Prompt"), "output": mark("Answer"), "input": mark("Context"), "system": mark("System prompt"),
    "reasoning": mark("Reasoning"), "ignore": mark("Ignore"),
}  # fmt: skip
_CARDS = 3
#: Largest share of the usable memory for a plan that leaves room.
_ROOMY = 0.75
#: A setting in a fix, with shell quotes.
_SETTING = re.compile(r"'dataset\.\w+=[^']*'|\bdataset\.\w+=[^\s']+")
#: A click must not allow a model's own code.
_LEFT_OUT = ("trust_remote_code",)


def sentence(edited: Edited) -> str:
    """Return "Train [model] on [data] with [GPU]"."""
    data = edited.data
    name = tr("{n} files", n=len(data)) if isinstance(data, list) else Path(data).name
    return render("sentence", model=Path(edited.model).name, data=name, gpu=_gpu_name(edited.recipe.gpu))


def _gpu_name(gpu: str) -> str:
    if gpu == "cpu":
        return "CPU"
    devices = [device for device in usable_devices() if gpu in (AUTO, device.index)]
    if devices:
        return f"{short_name(devices[0].name)} · {gib(devices[0].total_bytes)}"
    sizes = catalogue_sizes()
    return f"{card_label(gpu)} · {sizes[gpu]} GB" if gpu in sizes else gpu


def answer(plan: Plan, blocked: Blocker | None = None, *, has_bar: bool = True) -> str:
    """Return the verdict, its figures, and the memory bar."""
    level, is_ready = plan.verdict.level, not _failed(plan) and (blocked is None or blocked.elsewhere)
    return render(
        "answer", note=blocker_note(blocked) if blocked else "", level="warn" if level == "ok" and not is_ready else level,
        title=capital(tr(plan.verdict)), text="" if plan.verdict in (Verdict.FITS, Verdict.NO_FIT) else _because(plan),
        plan=plan, bar=parts_of(plan) if plan.forecast and has_bar else None, trust=_trust(plan),
    )  # fmt: skip


def blocker_note(blocker: Blocker) -> Safe:
    """Return a blocker with its fix."""
    shown = problem(blocker.title, blocker.problems, "" if blocker.override else blocker.fix)
    return render("blocker", blocker=blocker, problem=shown, label=_label(blocker), is_data=blocker.title == DataError.title)


def _because(plan: Plan) -> str:
    # the title shows the verdict already
    template, values = plan.verdict_sentence()
    return capital(tr(template, **values).removeprefix(tr(plan.verdict)).lstrip(":,：， ")) + "."


def _trust(plan: Plan) -> str:
    how = tr("Forecast from a dry run of this training step, on tensors without data.")
    # on a CPU only the whole process can be measured
    errors = read_history(plan.card.name).errors("process" if plan.card.is_cpu else "allocated")
    if not errors:
        return how
    off = f"{100 * statistics.median(map(abs, errors)):.1f}"
    return f"{how} {tr('Forecasts were off by {off} % here (median of {n}).', n=len(errors), off=off)}"


def plans(plan: Plan, *, is_complete: bool) -> str:
    """Return ways to run the recipe: plans that fit, fastest first; smaller plans if the chosen one does not fit."""
    is_big = plan.verdict == Verdict.NO_FIT
    fitting = [row for row in plan.alternatives if row.verdict.fits or (row.chosen and not is_big)]
    rows = _three(fitting, plan.usable_bytes) if len(fitting) > 1 else []
    fits = [item for item in plan.suggestions if is_big and item.peak_bytes <= plan.usable_bytes]
    return render(
        "plans", plan=plan, is_big=is_big, is_complete=is_complete,
        suggestions=sorted(fits, key=attrgetter("saves_bytes"))[:_CARDS],
        rows=[(mark("Fits"), row) for row in fitting[:_CARDS]] if is_big else rows,
        own=next((row for row in plan.alternatives if row.chosen), None),
    )  # fmt: skip


def _three(rows: Sequence[Alternative], usable: int) -> list[tuple[str, Alternative]]:
    def speed(row: Alternative) -> float:
        return row.tokens_per_s or 0.0

    # fastest, fastest with room, smallest; the chosen plan first if none of these is chosen
    roomy = [row for row in rows if row.peak_high_bytes <= _ROOMY * usable]
    named = {
        mark("Fastest"): max(rows, key=speed) if any(map(speed, rows)) else next((row for row in rows if row.chosen), rows[0]),
        mark("Leaves room"): max(roomy, key=speed, default=None),
        mark("Smallest"): min(rows, key=lambda row: row.peak_high_bytes),
    }  # fmt: skip
    names: dict[Alternative, str] = {}
    for name, row in named.items():
        if row is not None:
            names.setdefault(row, name)
    mine = [(mark("Yours"), row) for row in rows if row.chosen and row not in names]
    return [*mine, *((name, row) for row, name in names.items())][: _CARDS + 1]


def _failed(plan: Plan) -> ResourceCheck | None:
    return next((check for check in plan.checks if check.enough is False), None)


def ready(edited: Edited, plan: Plan | None, blocked: Blocker | None) -> tuple[str, bool]:
    """Return the line beside Start, and whether the run may start."""
    short, disk, can_start = None, None, False
    if plan is not None:
        short = _failed(plan)
        disk = next((check for check in plan.checks if check.what == "disk" and check.free_bytes), None)
        can_start = edited.is_complete and not blocked and not short and plan.verdict != Verdict.NO_FIT
    shown = render("ready", edited=edited, plan=plan, blocked=blocked, short=short, can_start=can_start, disk=disk)
    return shown, can_start


def model_panel(models: Sequence[Model], edited: Edited, badges: Mapping[str, Mapping[str, Any]], query: str, note: str) -> str:
    """Return the models by verdict, larger models first; in their order while verdicts come, so that no row moves."""

    def parameters(model: Model) -> int:
        return model.parameters or badges[model.name].get("parameters") or 0

    groups: Any = {None: models}
    if all(badges[model.name] for model in models):
        largest = sorted(models, key=parameters, reverse=True)
        groups = {kind: [model for model in largest if badges[model.name]["verdict"] == kind] for kind in Verdict}
    return render(
        "panel_model", groups=groups, badges=badges, edited=edited, query=query, gpu=_gpu_name(edited.recipe.gpu),
        parameters=parameters, trouble=Safe(note),
    )  # fmt: skip


@dataclass(frozen=True)
class Blocker:
    """Reason that keeps a run from starting."""

    title: str
    problems: list[str]
    fix: str = ""
    #: A button applies it.
    override: str = ""
    #: The plan is for another machine.
    elsewhere: bool = False


def blocker_of(recipe: Recipe, plan: Plan, folder: Path) -> Blocker | None:
    """Return the first reason against a start on this machine. `folder`: base of relative paths."""
    if plan.data_problem:
        problems, fix = list(plan.data_problem.problems), plan.data_problem.fix
        setting = _SETTING.search(fix)
        return Blocker(DataError.title, problems, fix, setting[0] if setting else "")
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
        return Blocker(error.title, error.problems, error.fix, f"gpu={AUTO}" if here else "", elsewhere=True)
    return None


def _label(blocker: Blocker) -> str:
    rows = re.match(r"([\d,]+) ", " ".join(blocker.problems))
    if blocker.override == "dataset.on_bad_rows=skip" and rows:
        return tr_n("Leave out {n} row", "Leave out {n} rows", int(rows[1].replace(",", "")))
    return in_words(blocker.override)


class Field:
    """One setting as a form field."""

    def __init__(self, row: Setting) -> None:
        self.name, self.row = row.name, row
        self.choices = [as_text(choice) for choice in row.choices]
        if row.type.endswith("| auto") and self.choices:
            self.choices.append("auto")
        if self.choices and self.default not in self.choices:
            self.choices.insert(0, "")

    @property
    def default(self) -> str:
        return "" if self.row.default in ("required", None, [], {}) else as_text(self.row.default)

    def help(self) -> str:
        is_list = not self.choices and self.row.type.startswith("list of ")
        kind = [tr("A list of {items}.", items=self.row.type.removeprefix("list of "))] if is_list else []
        usual = tr("Default: {value}.", value=self.default) if self.default else tr("Default: none.")
        return " ".join([tr(self.row.description), *kind, usual])

    def text(self, edited: Edited) -> str:
        values: Any = edited.values
        for part in self.name.split("."):
            values = values.get(part) if isinstance(values, dict) else None
        return self.default if values is None else as_text(values)

    def change(self, text: Any) -> dict[str, Any]:
        """Return the typed text, parsed like a recipe, as an argument of `Draft.change`; None restores the default."""
        written, value = str(text).strip(), None
        if written not in ("", self.default):
            value = recipe_yaml.parse_value(written)
            # a text setting keeps `1` or `true` as text
            value = written if self.row.type.startswith("text") and not isinstance(value, (list, dict)) else value
        return {self.name.replace(".", "__"): value}


def fields() -> list[Field]:
    """Return all settings in schema order."""
    return [Field(row) for row in settings_reference() if row.name not in _LEFT_OUT]


def form() -> str:
    """Return all fields in groups, with defaults."""
    groups = [(title, [field for field in fields() if field.row.group == title]) for title in GROUPS]
    return render("form", groups=groups)


def changed_values(edited: Edited) -> dict[str, str]:
    """Return the texts of fields that differ from their default."""
    # the form itself has only defaults, and the browser fills these in
    return {field.name: text for field in fields() if (text := field.text(edited)) != field.default}
