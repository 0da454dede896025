"""Model: choose the base model; whether each fits is worked out while the page is open."""

from __future__ import annotations

import json
import time
from typing import Any

import gradio as gr

from finetune.errors import FinetuneError

from ..context import Context
from ..language import mark, tr
from ..planning.badges import Badges
from ..planning.catalogue import Model, local_models, search_models
from ..views import models as model_views
from ..views.binding import QUIET, change_trigger, fingerprint, show
from ..views.markup import note
from ..views.problems import problem, settings_problem

_TICK_S = 1.0
_LISTED = 24
#: Seconds for which the list of models on this machine is good.
_GOOD_S = 10.0


def build(context: Context, page: gr.Blocks) -> None:
    """Components and their handlers."""
    view = _View(context)
    show(model_views.chooser)
    act, search_results = gr.Textbox(visible="hidden", elem_id="model-act"), gr.State([])
    status, model_list = show(elem_id="model-status"), show(elem_id="model-list")
    changed = change_trigger()
    page.load(view.tick, search_results, changed, **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, search_results, changed, **QUIET)
    changed.change(view.show, search_results, model_list, **QUIET)
    act.change(view.act, [act, search_results], [status, search_results, model_list], **QUIET)


class _View:
    def __init__(self, context: Context) -> None:
        self.context, self._badges = context, Badges(context.planner, context.draft)
        self._here: list[Model] = []
        self._looked_s = -_GOOD_S

    def tick(self, search_results: list[Model]) -> str:
        return fingerprint(self.show(search_results))

    def show(self, search_results: list[Model]) -> str:
        """The models that were searched for, then those that are here, with the verdicts that are there."""
        recipe = self.context.draft.read().recipe
        chosen = recipe.model_name_or_path if recipe else ""
        models = {model.name: model for model in [*search_results, *self._local()][:_LISTED]}
        if chosen and chosen not in models:
            models = {chosen: Model(chosen, mark("chosen")), **models}
        return model_views.model_list(list(models.values()), chosen, self._badges.of(list(models)))

    def _local(self) -> list[Model]:
        """The models that are here; looked for again after a while."""
        if time.monotonic() - self._looked_s > _GOOD_S:
            self._here, self._looked_s = local_models(self.context.workspace), time.monotonic()
        return self._here

    def act(self, message: str, search_results: list[Model]) -> list[Any]:
        """What a button asks for: a model for the draft, or a search."""
        try:
            action = json.loads(message)
            name, query = str(action.get("model", "")).strip(), str(action.get("search", "")).strip()
        except (ValueError, AttributeError):  # no message of this page
            return [gr.skip()] * 3
        status = ""
        if name:
            edited = self.context.draft.change(model_name_or_path=name, model_revision=None)
            status = settings_problem(edited.problems, edited.fix) if edited.problems else ""
        else:
            try:
                search_results = search_models(query) if query else []
            except FinetuneError as error:
                status = problem(tr("Offline"), error.problems, error.fix)
            if query and not search_results and not status:
                status = note(tr("Hugging Face has no model with this name."))
        return [status, search_results, self.show(search_results)]
