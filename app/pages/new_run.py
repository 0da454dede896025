"""New run: one screen from model, data and GPU to the start."""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastapi.responses import PlainTextResponse, Response

from finetune.card.find import catalogue_sizes
from finetune.card.visible import usable_devices
from finetune.errors import CommandError, FinetuneError
from finetune.planner.plan import Plan, Verdict
from finetune.recipe import find_recipe, load_recipe, shipped_recipes, write_recipe
from finetune.settings import AUTO, Recipe

from ..background import OPEN_STATES, start_run, starts
from ..draft import DATA_ENDINGS, DEMO_RECIPE, DraftState, Model, card_label, local_datasets, local_models, search_models
from ..language import tr
from ..views import data as data_views
from ..views import new_run as views
from ..views.markup import Safe, note, problem_of, render
from ..views.run import settings_table
from ..web.followed import Context, attempted
from ..worker import SupersededError

_LISTING_S = 10.0  # then the local models are listed again
_MOST_MODELS = 30
#: Seconds of planning verdicts per request of the models' panel; the browser repeats the request while the panel is open.
_VERDICTS_S = 2.0
_NOT_IN_NAMES = re.compile(r"[^\w.-]+")  # of runs and files


class NewRun:
    """Page and routes of New run."""

    def __init__(self, context: Context) -> None:
        # one draft for all tabs
        self.context = context
        self._verdicts: dict[tuple[str, str], dict[str, Any]] = {}
        self._fields = {field.name: field for field in views.fields()}
        #: Request for a plan of the newest draft: recipe, and whether it has data; and the newest plan with its request.
        self._newest_request = ("", False)
        self._newest_plan: tuple[tuple[str, bool], Plan | None] = (self._newest_request, None)
        self._local_models: list[Model] = []
        self._models_listed_s = -_LISTING_S  # not yet
        #: Name of the newest start from this page, and the stamp of its draft.
        self._started = ("", 0)

    def html(self, query: Mapping[str, str]) -> str:
        return render("new_run")

    def screen(self, mine: str = "") -> dict[str, Any]:
        """Return the draft, planner progress, and the state of `mine`, this tab's start."""
        edited = self.context.draft.read()
        statuses = {start.path.name: start.view() for start in starts(self.context.workspace)}
        started, stamp = self._started
        if started in statuses and stamp == edited.stamp and statuses[started]["state"] == "started":
            edited = self.context.draft.clear()  # the next run starts with an empty draft
        parts, is_starting = {"sentence": views.sentence(edited), "starting": "", "progress": ""}, False
        if mine in statuses:
            is_starting = statuses[mine]["state"] in OPEN_STATES
            parts["starting" if is_starting else "progress"] = render("started", status=statuses[mine])
        # the texts of fields that differ from their default: the browser fills these into the form, which has only defaults
        values = {name: text for name, field in self._fields.items() if (text := field.text(edited)) != field.default}
        return {
            "stamp": edited.stamp, "parts": parts, "doing": self.context.planner.doing, "values": values,
            "starting": is_starting,
        }  # fmt: skip

    def plan(self, complete: bool = False) -> dict[str, Any]:
        """Return the draft's plan, with alternatives if `complete`."""
        # a plan takes seconds: the stamp lets the browser drop the plan of an older draft
        edited = self.context.draft.read()
        plan, blocked, verdict = None, None, ""
        try:
            if edited.model:
                plan = self._plan_of((write_recipe(edited.recipe), bool(edited.data)), complete=complete)
        except SupersededError:  # the draft has changed: stamp -1 is no draft's
            return {"stamp": -1, "parts": {}}
        except FinetuneError as error:
            no_plan = {"level": "unknown", "title": tr("Unknown: no plan"), "text": "", "bar": None}
            verdict = render("answer", plan=None, note=problem_of(error), **no_plan)
        if plan:
            blocked = views.blocker_of(edited.recipe, plan, self.context.workspace.root) if edited.data else None
            verdict = views.verdict(plan, blocked)
        ready, can_start = views.ready(edited, plan, blocked)
        parts = {
            "answer": verdict, "ready": ready, "plans": views.plans(plan, is_complete=complete) if plan else "",
            "settings": render("settings", edited=edited, plan=plan) if edited.model else "",
        }  # fmt: skip
        return {"stamp": edited.stamp, "parts": parts, "start": can_start, "complete": complete or plan is None}

    def _plan_of(self, request: tuple[str, bool], *, complete: bool) -> Plan:
        planner = self.context.planner
        if request != self._newest_request:
            self._newest_request = request
            planner.cancel("plan")  # of an earlier draft
        planner.cancel("model_verdict")  # the plan goes before verdicts of models
        recipe, has_data = request
        question: dict[str, Any] = {"recipe": recipe, "has_data": has_data, "compare": complete}
        plan = Plan.from_json(planner.call("plan", is_wanted=lambda: request == self._newest_request, **question))
        self._newest_plan = request, plan
        return plan

    def change(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Apply a message of the page; return the new screen."""
        parts = attempted(self._change, message)
        refused = parts.pop("said")
        has_started = ("start" in message or "demo" in message) and not refused
        mine = self._started[0] if has_started else ""
        screen = self.screen(mine)
        return {**screen, "mine": mine, "parts": {**screen["parts"], "refused": refused, **parts}}

    def _change(self, message: Mapping[str, Any]) -> dict[str, str]:
        draft = self.context.draft
        match message:
            case {"set": "text", "text": str(text)}:
                draft.write(text, is_typed=True)
            case {"set": str(name), "text": text}:
                draft.change(**self._fields[name].change(text))
            case {"model": str(name)}:
                draft.change(model_name_or_path=name.strip() or None)
            case {"gpu": str(name)}:
                draft.change(gpu=name)
            case {"data": str(path)}:
                self._choose_data(path)
            case {"upload": str(path)}:
                self._choose_data(self._take_upload(path))
            case {"override": str(override)}:
                draft.apply(override)
            case {"recipe": str(name)} if name in shipped_recipes():
                draft.write(find_recipe(name).read_text(encoding="utf-8"), keep=("model_name_or_path", "dataset"))
            case {"columns": {**roles}}:
                self._set_columns({str(name): str(role) for name, role in roles.items()})
            case {"row": index}:
                text = write_recipe(draft.read().recipe)
                return {"row": data_views.marked_row(self.context.planner.call("row", recipe=text, index=int(index)))}
            case {"walk": number, "at": at}:
                answer = self.context.planner.call("look", recipe=write_recipe(draft.read().recipe))
                problems = data_views.problems_of(answer)
                if number >= len(problems) or at >= len(problems[number].rows):
                    raise CommandError("the rows have changed", "Open the data panel again.")
                problem = problems[number]
                text = data_views.source_text(self.context.workspace.root, problem.rows[at])
                return {"row": data_views.refused_row(number, at, problem, text)}
            case {"clear": True}:
                draft.clear()
            case {"demo": True}:
                self._start(load_recipe(DEMO_RECIPE), draft_stamp=-1)  # -1: no draft's stamp
            case {"start": True}:
                edited = draft.read()
                if not edited.is_complete:
                    raise CommandError("nothing to train", "Choose a model and your data.")
                self._start(edited.recipe, edited.stamp, str(message.get("name") or ""), force=bool(message.get("force")))
            case _:
                raise KeyError(message)
        return {}

    def _choose_data(self, path: str) -> None:
        edited = self.context.draft.change(dataset={"path": path.strip()}, method=AUTO)
        if edited.data:
            with contextlib.suppress(FinetuneError):  # the data panel shows the error
                answer = self.context.planner.call("columns", recipe=write_recipe(edited.recipe))
                # guessed roles must be in the recipe: a run would ask for them
                if answer["is_guess"] and {"instruction", "output"}.issubset(answer["roles"].values()):
                    self._set_columns(answer["roles"])

    def _set_columns(self, roles: dict[str, str]) -> None:
        used_roles = [role for role in roles.values() if role != "ignore"]
        # a role names one column in `dataset.columns`
        if repeated := sorted({views.ROLES[role] for role in used_roles if used_roles.count(role) > 1}):
            raise CommandError([tr("two columns are {role}", role=tr(repeated[0]))], tr("Choose Ignore for one of them."))
        columns = {role: name for name, role in roles.items() if role != "ignore"}
        ignored = [name for name, role in roles.items() if role == "ignore"]
        self.context.draft.change(dataset__columns=columns or None, dataset__ignore_columns=ignored or None)

    def _take_upload(self, path: str) -> str:
        source = self.context.uploaded(path)
        suffix = source.suffix.lower()
        if suffix not in DATA_ENDINGS:
            raise CommandError(f"{source.name}: this file type is not supported", f"Use {', '.join(DATA_ENDINGS)}.")
        stem = _NOT_IN_NAMES.sub("-", source.stem)[:60].strip("-. ") or "data"
        folder = self.context.workspace.folder("uploads")
        target, number = folder / f"{stem}{suffix}", 2
        while target.exists():
            target, number = folder / f"{stem}-{number}{suffix}", number + 1
        shutil.move(source, target)
        return self.context.workspace.path_in_recipe(target)

    def _start(self, recipe: Recipe, draft_stamp: int, name: str = "", *, force: bool = False) -> None:
        name, workspace = _NOT_IN_NAMES.sub("-", name).strip("-. "), self.context.workspace
        if not name and recipe.output_dir == AUTO:
            model = _NOT_IN_NAMES.sub("-", Path(recipe.model_name_or_path).name).strip("-. ") or "model"
            name = f"{model}-{time.strftime('%Y%m%d-%H%M%S')}"
        folder = workspace.runs / name if name else workspace.root / recipe.output_dir
        if folder.exists():
            raise CommandError(f"there is a run called {folder.name} already", "Choose another name.")
        start = start_run(workspace, recipe.model_copy(update={"output_dir": str(folder)}), force=force)
        self._started = start.path.name, draft_stamp

    def panel(self, name: str, query: str = "", *, check: bool = False) -> str:
        edited = self.context.draft.read()
        match name:
            case "model":
                return self._model_panel(edited, query.strip()[:200], check=check)
            case "gpu":
                sizes, chosen = catalogue_sizes(), edited.recipe.gpu
                return render("panel_gpu", here=usable_devices(), sizes=sizes, chosen=chosen, card_label=card_label)
            case "data":
                # without rows: reading takes time, and the browser fetches the rows afterwards
                path = edited.data if isinstance(edited.data, str) else ", ".join(edited.data)
                names = local_datasets(self.context.workspace)
                return render("panel_data", path=path, names=names, kinds=", ".join(DATA_ENDINGS))
            case "look":
                return self._look(edited)
            case "settings":
                plan = self._newest_plan[1] if self._newest_plan[0] == self._newest_request else None
                reasons = settings_table(plan) if plan else ""
                return render("panel_settings", plan=plan, reasons=reasons, form=Safe(views.form()))
            case "recipe":
                return render("panel_recipe", edited=edited, recipes=list(shipped_recipes()))
        return ""

    def _model_panel(self, edited: DraftState, query: str, *, check: bool) -> str:
        if time.monotonic() - self._models_listed_s > _LISTING_S:
            self._local_models, self._models_listed_s = local_models(self.context.workspace), time.monotonic()
        matches = {model.name: model for model in self._local_models if query.lower() in model.name.lower()}
        hub_error = ""
        if query:
            try:
                matches |= {model.name: model for model in search_models(query) if model.name not in matches}
            except FinetuneError as error:
                hub_error = note("; ".join(error.problems))
        models = list(matches.values())[:_MOST_MODELS]
        verdicts = self._verdicts_of([model.name for model in models], edited.recipe, check=check)
        return views.model_panel(models, edited, verdicts, query, hub_error)

    def _verdicts_of(self, names: Sequence[str], recipe: Recipe, *, check: bool) -> dict[str, dict[str, Any]]:
        # the settings that decide a verdict, without the model
        key = recipe.model_dump_json(include={"dataset", "gpu", "max_length"})
        missing = [name for name in names if (key, name) not in self._verdicts]
        deadline_s = time.monotonic() + _VERDICTS_S
        while check and missing and time.monotonic() < deadline_s:
            name = missing.pop(0)
            try:
                verdict = self.context.planner.call("model_verdict", recipe=write_recipe(recipe), model=name)
            except SupersededError:  # the draft's plan goes first
                break
            except FinetuneError as error:
                verdict = {"verdict": Verdict.UNKNOWN, "because": error.problems[0]}
            self._verdicts[key, name] = verdict
        return {name: self._verdicts.get((key, name), {}) for name in names}

    def _look(self, edited: DraftState) -> str:
        if not edited.data:
            return ""
        text = write_recipe(edited.recipe)
        try:
            columns = render("columns", answer=self.context.planner.call("columns", recipe=text), roles=views.ROLES)
        except FinetuneError as error:
            return problem_of(error)
        try:
            answer = self.context.planner.call("look", recipe=text)
        except FinetuneError as error:
            return columns + problem_of(error)
        return data_views.look(answer, self.context.draft.read().recipe, columns)

    def recipe_file(self) -> Response:
        headers = {"content-disposition": 'attachment; filename="recipe.yaml"'}
        return PlainTextResponse(self.context.draft.read().text, headers=headers)

    def add_routes(self, api: Any) -> None:
        api.get("/ft/recipe.yaml")(self.recipe_file)
        api.get("/ft/new/screen")(self.screen)
        api.get("/ft/new/plan")(self.plan)
        api.get("/ft/new/panel/{name}")(self.panel)
        api.post("/ft/new/change")(self.change)
