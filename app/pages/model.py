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
from ..views import models as view_of
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
    show(view_of.chooser)
    act, hits = gr.Textbox(visible="hidden", elem_id="model-act"), gr.State([])
    status, listed = show(elem_id="model-status"), show(elem_id="model-list")
    changed = change_trigger()
    page.load(view.tick, hits, changed, **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, hits, changed, **QUIET)
    changed.change(view.show, hits, listed, **QUIET)
    act.change(view.act, [act, hits], [status, hits, listed], **QUIET)


class _View:
    def __init__(self, context: Context) -> None:
        self.context, self._badges = context, Badges(context.planner, context.draft)
        self._here: list[Model] = []
        self._looked_s = -_GOOD_S

    def tick(self, hits: list[Model]) -> str:
        return fingerprint(self.show(hits))

    def show(self, hits: list[Model]) -> str:
        """The models that were searched for, then those that are here, with the verdicts that are there."""
        recipe = self.context.draft.read().recipe
        chosen = recipe.model_name_or_path if recipe else ""
        models = {model.name: model for model in [*hits, *self._local()][:_LISTED]}
        if chosen and chosen not in models:
            models = {chosen: Model(chosen, mark("chosen")), **models}
        return view_of.model_list(list(models.values()), chosen, self._badges.of(list(models)))

    def _local(self) -> list[Model]:
        """The models that are here; looked for again after a while."""
        if time.monotonic() - self._looked_s > _GOOD_S:
            self._here, self._looked_s = local_models(self.context.workspace), time.monotonic()
        return self._here

    def act(self, message: str, hits: list[Model]) -> list[Any]:
        """What a button asks for: a model for the draft, or a search."""
        try:
            wish = json.loads(message)
            name, query = str(wish.get("model", "")).strip(), str(wish.get("search", "")).strip()
        except (ValueError, AttributeError):  # no message of this page
            return [gr.skip()] * 3
        status = ""
        if name:
            edited = self.context.draft.change(model_name_or_path=name, model_revision=None)
            status = settings_problem(edited.problems, edited.fix) if edited.problems else ""
        else:
            try:
                hits = search_models(query) if query else []
            except FinetuneError as error:
                status = problem(tr("Offline"), error.problems, error.fix)
            if query and not hits and not status:
                status = note(tr("Hugging Face has no model with this name."))
        return [status, hits, self.show(hits)]
