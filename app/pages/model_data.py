"""Model and data: choose both, and see what will be trained on."""

from __future__ import annotations

from typing import Any

import gradio as gr

from finetune.errors import FinetuneError
from finetune.planner.plan import Verdict
from finetune.units import format_bytes, format_count

from ..context import Context
from ..planning.catalogue import DATA_ENDINGS, Model, local_datasets, local_models, search_models
from ..planning.own_data import choose_data, take_upload
from ..views import data as data_view
from ..views.binding import BUTTON, QUIET, show
from ..views.markup import Safe, inert, note, problem, settings_problem, table

_CHECKED, _TICK_S = 12, 1.0


def build(context: Context, page: gr.Blocks) -> None:
    """Components and their handlers."""
    view = _View(context)
    show('<h1 class="ft-title" data-title="Model and data">Model and data</h1>')
    with gr.Row():
        with gr.Column(min_width=320):
            show("<h2>Base model</h2>")
            model = gr.Dropdown(
                [],
                label="Model",
                info="bundled, downloaded, a folder, or a Hugging Face id",
                allow_custom_value=True,
                elem_id="model-name",
            )
            with gr.Row(elem_classes="ft-controls"):
                query = gr.Textbox(label="Search Hugging Face", max_length=100, elem_id="model-search", scale=3)
                search = gr.Button("Search", elem_id="model-search-go", size="sm", scale=1)
                check = gr.Button("Check which fit", elem_id="model-check", size="sm", scale=1)
            listed = show(elem_id="model-list")
        with gr.Column(min_width=320):
            show("<h2>Data</h2>")
            data = gr.Dropdown(
                [],
                label="Dataset",
                info="bundled, a local file, or a Hugging Face id",
                allow_custom_value=True,
                elem_id="data-name",
            )
            upload = gr.UploadButton(
                f"Upload a file ({', '.join(DATA_ENDINGS)})", file_types=list(DATA_ENDINGS), elem_id="data-upload", size="sm"
            )
            trouble = show(elem_id="data-trouble")
            progress = show(elem_id="data-progress")
            report = show('<p class="ft-note"><span class="ft-busy"></span> reading the data</p>', elem_id="data-report")
    show('<p><a class="ft-button primary" href="/fit">Next: Fit</a></p>')
    with gr.Row():
        with gr.Column(min_width=320):
            show("<h2>Row lengths</h2>")
            lengths = show(elem_id="data-lengths")
            show("<h2>First row as the model sees it, trained tokens marked</h2>")
            marked = show(elem_id="data-marked")
        with gr.Column(min_width=320):
            show("<h2>First rows as conversations</h2>")
            conversations = show(elem_id="data-conversations")
    gr.Timer(_TICK_S).tick(view.progress, None, progress, **QUIET)
    shown = [trouble, report, lengths, marked, conversations]
    page.load(view.choose, None, [model, data, listed], **QUIET).then(view.look, None, shown, **QUIET)
    model.input(view.set_model, model, trouble, **QUIET).then(view.look, None, shown, **QUIET)
    data.input(view.set_data, data, trouble, **QUIET).then(view.look, None, shown, **QUIET)
    upload.upload(view.upload, upload, [data, trouble], **BUTTON).then(view.look, None, shown, **QUIET)
    search.click(view.search, query, [listed, model], **BUTTON)
    query.submit(view.search, query, [listed, model], **BUTTON)
    check.click(view.check, query, listed, **BUTTON)


class _View:
    """Handlers: each changes the draft or shows it."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def choose(self) -> list[Any]:
        """Choices of model and dataset, and the draft's values."""
        self.context.planner.warm()
        edited = self.context.draft.read()
        models, datasets = local_models(self.context.workspace), local_datasets(self.context.workspace)
        model = edited.recipe.model_name_or_path if edited.recipe else None
        path = edited.recipe.dataset.path if edited.recipe else None
        data = path if isinstance(path, str) else None
        return [
            gr.Dropdown([entry.name for entry in models], value=model),
            gr.Dropdown(datasets, value=data),
            _models(models, {}),
        ]

    def set_model(self, name: str | None) -> str:
        """Set the draft's model, without the previous model's revision."""
        edited = self.context.draft.change(model_name_or_path=(name or "").strip(), model_revision=None)
        return settings_problem(edited.problems, edited.fix) if edited.problems else ""

    def set_data(self, path: str | None) -> str:
        """Set the draft's dataset, without the previous dataset's options."""
        edited = choose_data(self.context.draft, path)
        return settings_problem(edited.problems, edited.fix) if edited.problems else ""

    def upload(self, path: str | None) -> list[Any]:
        """Move an uploaded file to the app's uploads and set it as the dataset."""
        try:
            name = take_upload(self.context.workspace, path)
        except FinetuneError as error:
            return [gr.skip(), problem("This file can't be used", error.problems, error.fix)]
        return [gr.Dropdown(local_datasets(self.context.workspace), value=name), self.set_data(name)]

    def look(self) -> list[Any]:
        """Read the data as a run would, and show it."""
        edited = self.context.draft.read()
        if edited.recipe is None:
            return [settings_problem(edited.problems, edited.fix), *[""] * 4]
        try:
            answer = self.context.planner.ask("look", recipe=edited.text)
        except FinetuneError as error:
            return [problem(error.title, error.problems, error.fix), *[""] * 4]
        return [
            "", data_view.report(answer, edited.recipe), data_view.lengths(answer, edited.recipe), data_view.marked(answer),
            data_view.conversations(answer),
        ]  # fmt: skip

    def progress(self) -> str:
        """How far the reading of the rows is."""
        message = self.context.planner.progress
        return note(message) if message else ""

    def search(self, query: str) -> list[Any]:
        """Models that the hub finds; local models when nothing is searched for."""
        here = local_models(self.context.workspace)
        if not query.strip():
            return [_models(here, {}), gr.Dropdown([model.name for model in here])]
        try:
            models = search_models(query)
        except FinetuneError as error:
            return [problem("Offline", error.problems, error.fix) + _models(here, {}), gr.skip()]
        if not models:
            return [note("Hugging Face has no model with this name."), gr.skip()]
        return [_models(models, self._badges(models)), gr.Dropdown([model.name for model in [*models, *here]])]

    def check(self, query: str) -> str:
        """Badges for the local models."""
        models = local_models(self.context.workspace)
        return _models(models, self._badges(models))

    def _badges(self, models: list[Model]) -> dict[str, Any]:
        edited = self.context.draft.read()
        if edited.recipe is None:
            return {}
        try:
            return self.context.planner.ask("badges", recipe=edited.text, models=[model.name for model in models[:_CHECKED]])[
                "badges"
            ]
        except FinetuneError as error:
            return {model.name: {"verdict": Verdict.UNKNOWN, "because": error.problems[0]} for model in models}


def _models(models: list[Model], badges: dict[str, Any]) -> str:
    rows = []
    for model in models:
        badge = badges.get(model.name)
        parameters = model.parameters or (badge or {}).get("parameters")
        size = format_count(parameters) if parameters else None
        rows.append([model.name, Safe(_badge(badge)), model.source, size, model.licence])
    return table(["model", "fit", "from", ">parameters", "licence"], rows, "Models", hidden_caption=True)


def _badge(badge: dict[str, Any] | None) -> str:
    if badge is None:
        return '<span class="ft-badge">not checked</span>'
    peak = f" {format_bytes(badge['peak_bytes'])}" if badge.get("peak_bytes") else ""
    bits = f" in {badge['bits']}-bit" if badge.get("bits") else ""
    css = Verdict(badge["verdict"]).level
    why = f" <small>{inert(badge['because'], 160)}</small>" if badge.get("because") else ""
    return f'<span class="ft-badge {css}">{inert(badge["verdict"])}{inert(peak)}{bits}</span>{why}'
