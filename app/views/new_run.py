"""New run as HTML: sentence, verdict, plans, settings, panels, and what keeps the run from starting."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

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

from ..draft import DraftState, Model, as_text, card_label
from ..language import mark, tr, tr_n
from .markup import Safe, problem, render
from .run import memory_bar_parts
from .words import capitalized, in_words, short_name

#: Roles of data columns, by field of `dataset.columns`.
ROLES = mark({
    "instruction": "Prompt", "output": "Answer", "input": "Context", "system": "System prompt",
    "reasoning": "Reasoning", "ignore": "Ignore",
})  # fmt: skip
_MOST_PLANS = 3
_ROOMY_SHARE = 0.75  # of the usable memory: a plan that takes at most this share leaves room
#: A setting in a fix, which a button can apply; with shell quotes.
_DATASET_SETTING = re.compile(r"'dataset\.\w+=[^']*'|\bdataset\.\w+=[^\s']+")
_LEFT_OUT = ("trust_remote_code",)  # of the form: a click must not run a model's own code


def sentence(edited: DraftState) -> str:
    """Return "Train [model] on [data] with [GPU]" with buttons."""
    data = edited.data
    data_name = tr("{n} files", n=len(data)) if isinstance(data, list) else Path(data).name
    return render("sentence", model=Path(edited.model).name, data=data_name, gpu=_gpu_name(edited.recipe.gpu))


def _gpu_name(gpu: str) -> str:
    if gpu == "cpu":
        return "CPU"
    devices = [device for device in usable_devices() if gpu in (AUTO, device.index)]
    if devices:
        return f"{short_name(devices[0].name)} · {gib(devices[0].total_bytes)}"
    sizes = catalogue_sizes()
    return f"{card_label(gpu)} · {sizes[gpu]} GB" if gpu in sizes else gpu


def verdict(plan: Plan, blocked: Blocker | None = None, *, has_bar: bool = True) -> str:
    """Return whether the plan fits, its figures and the memory bar."""
    is_ready = not _failed_check(plan) and (blocked is None or blocked.is_elsewhere)
    level = "warn" if plan.verdict.level == "ok" and not is_ready else plan.verdict.level
    title, text = tr(plan.verdict), ""
    if plan.verdict not in (Verdict.FITS, Verdict.NO_FIT):
        template, values = plan.verdict_sentence()
        # the title shows the verdict already
        text = capitalized(tr(template, **values).removeprefix(title).lstrip(":,：， ")) + "."
    return render(
        "answer", note=blocker_note(blocked) if blocked else "", level=level, title=capitalized(title), text=text,
        plan=plan, bar=memory_bar_parts(plan) if plan.forecast and has_bar else None, trust=_forecast_trust(plan),
    )  # fmt: skip


def blocker_note(blocker: Blocker) -> Safe:
    """Return a blocker with its fix."""
    box = problem(blocker.title, blocker.problems, "" if blocker.override else blocker.fix)
    label = in_words(blocker.override)
    row_count = re.match(r"([\d,]+) ", " ".join(blocker.problems))
    if blocker.override == "dataset.on_bad_rows=skip" and row_count:
        label = tr_n("Leave out {n} row", "Leave out {n} rows", int(row_count[1].replace(",", "")))
    return render("blocker", blocker=blocker, box=box, button_label=label, is_data=blocker.title == DataError.title)


def _forecast_trust(plan: Plan) -> str:
    source = tr("Forecast from a dry run of this training step, on tensors without data.")
    # on a CPU only the whole process can be measured
    errors = read_history(plan.card.name).errors("process" if plan.card.is_cpu else "allocated")
    if not errors:
        return source
    error_percent = f"{100 * statistics.median(map(abs, errors)):.1f}"
    return f"{source} {tr('Forecasts were off by {off} % here (median of {n}).', n=len(errors), off=error_percent)}"


def plans(plan: Plan, *, is_complete: bool) -> str:
    """Return plans to choose from: plans that fit, or smaller plans if the chosen plan does not."""
    is_too_big = plan.verdict == Verdict.NO_FIT
    fitting = [row for row in plan.alternatives if row.verdict.fits or (row.chosen and not is_too_big)]
    suggestions = []
    if is_too_big:
        rows = [(mark("Fits"), row) for row in fitting[:_MOST_PLANS]]
        suggestions = [item for item in plan.suggestions if item.peak_bytes <= plan.usable_bytes]
    else:
        rows = _named_plans(fitting, plan.usable_bytes) if len(fitting) > 1 else []
    return render(
        "plans", plan=plan, is_too_big=is_too_big, is_complete=is_complete, rows=rows,
        suggestions=sorted(suggestions, key=attrgetter("saves_bytes"))[:_MOST_PLANS],
        chosen=next((row for row in plan.alternatives if row.chosen), None),
    )  # fmt: skip


def _named_plans(rows: Sequence[Alternative], usable_bytes: int) -> list[tuple[str, Alternative]]:
    def speed(row: Alternative) -> float:
        return row.tokens_per_s or 0.0

    # fastest (chosen plan if no speed is known), fastest with room, smallest; the chosen plan first if none of these is chosen
    roomy = [row for row in rows if row.peak_high_bytes <= _ROOMY_SHARE * usable_bytes]
    candidates = {
        mark("Fastest"): max(rows, key=speed) if any(map(speed, rows)) else next((row for row in rows if row.chosen), rows[0]),
        mark("Leaves room"): max(roomy, key=speed, default=None),
        mark("Smallest"): min(rows, key=lambda row: row.peak_high_bytes),
    }  # fmt: skip
    names: dict[Alternative, str] = {}
    for name, row in candidates.items():
        if row is not None:
            names.setdefault(row, name)
    chosen = [(mark("Yours"), row) for row in rows if row.chosen and row not in names]
    return chosen + [(name, row) for row, name in names.items()]


def _failed_check(plan: Plan) -> ResourceCheck | None:
    return next((check for check in plan.checks if check.enough is False), None)


def ready(edited: DraftState, plan: Plan | None, blocked: Blocker | None) -> tuple[str, bool]:
    """Return the line beside Start, and whether the run may start."""
    failed, disk, can_start = None, None, False
    if plan is not None:
        failed = _failed_check(plan)
        disk = next((check for check in plan.checks if check.what == "disk" and check.free_bytes), None)
        can_start = edited.is_complete and not blocked and not failed and plan.verdict != Verdict.NO_FIT
    html = render("ready", edited=edited, plan=plan, blocked=blocked, failed=failed, can_start=can_start, disk=disk)
    return html, can_start


def model_panel(
    models: Sequence[Model], edited: DraftState, verdicts: Mapping[str, Mapping[str, Any]], query: str, hub_error: str
) -> str:
    """Return the models by verdict, larger models first."""

    def parameters(model: Model) -> int:
        return model.parameters or verdicts[model.name].get("parameters") or 0

    groups: Any = {None: models}
    if all(verdicts[model.name] for model in models):  # sorted earlier, the rows would move while verdicts come
        largest = sorted(models, key=parameters, reverse=True)
        groups = {kind: [model for model in largest if verdicts[model.name]["verdict"] == kind] for kind in Verdict}
    return render(
        "panel_model", groups=groups, verdicts=verdicts, edited=edited, query=query, gpu=_gpu_name(edited.recipe.gpu),
        parameters=parameters, hub_error=Safe(hub_error),
    )  # fmt: skip


@dataclass(frozen=True)
class Blocker:
    """Reason why a run can't start here."""

    title: str
    problems: list[str]
    fix: str = ""
    #: Change of the recipe that removes the reason, for a button.
    override: str = ""
    #: Whether the plan is for another machine.
    is_elsewhere: bool = False


def blocker_of(recipe: Recipe, plan: Plan, folder: Path) -> Blocker | None:
    """Return why the run can't start here, if so. `folder`: base of relative paths."""
    if plan.data_problem:
        problems, fix = list(plan.data_problem.problems), plan.data_problem.fix
        setting = _DATASET_SETTING.search(fix)
        return Blocker(DataError.title, problems, fix, setting[0] if setting else "")
    if plan.data is None:
        try:
            for path in [recipe.dataset.path] if isinstance(recipe.dataset.path, str) else recipe.dataset.path:
                # a pattern, as `data/*.jsonl`, is not looked up
                if not (folder / path).exists() and not set("*?[") & set(path):
                    find_sources(path, recipe.dataset, split=recipe.dataset.split)
        except DataError as error:
            # the fix names this process's working folder, which is empty
            return Blocker(error.title, error.problems, error.fix.replace(str(Path.cwd()), str(folder)))
    if plan.card.problem:
        return Blocker(mark("No run can use this GPU now"), [plan.card.problem], plan.card.problem_fix)
    try:
        find_card(recipe.gpu, here=True, processes=recipe.launch.processes_here)
    except FinetuneError as error:
        has_other_gpu = bool(usable_devices()) and recipe.gpu != AUTO
        return Blocker(error.title, error.problems, error.fix, f"gpu={AUTO}" if has_other_gpu else "", is_elsewhere=True)
    return None


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
        item_type = [tr("A list of {items}.", items=self.row.type.removeprefix("list of "))] if is_list else []
        default = tr("Default: {value}.", value=self.default) if self.default else tr("Default: none.")
        return " ".join([tr(self.row.description), *item_type, default])

    def text(self, edited: DraftState) -> str:
        values: Any = edited.values
        for part in self.name.split("."):
            values = values.get(part) if isinstance(values, dict) else None
        return self.default if values is None else as_text(values)

    def change(self, text: Any) -> dict[str, Any]:
        """Return a typed text, parsed, as an argument of `Draft.change`; None restores the default."""
        written, value = str(text).strip(), None
        if written not in ("", self.default):
            value = recipe_yaml.parse_value(written)
            # `1` or `true` in a text setting stays text
            value = written if self.row.type.startswith("text") and not isinstance(value, (list, dict)) else value
        return {self.name.replace(".", "__"): value}


def fields() -> list[Field]:
    """Return all settings in schema order."""
    return [Field(row) for row in settings_reference() if row.name not in _LEFT_OUT]


def form() -> str:
    """Return the form of all settings, with defaults."""
    groups = [(title, [field for field in fields() if field.row.group == title]) for title in GROUPS]
    return render("form", groups=groups)
