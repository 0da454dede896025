"""Data: where it comes from, the problems to work off, a row as the model sees it, what is held out."""

from __future__ import annotations

import functools
import json
from typing import Any

import gradio as gr

from finetune.errors import FinetuneError

from ..context import Context
from ..language import mark, tr
from ..planning.catalogue import DATA_ENDINGS, local_datasets
from ..planning.draft import Edited
from ..planning.own_data import choose_data, take_upload
from ..planning.refused_rows import Problem, problems_of, source_text, with_roles_corrected
from ..views import data as data_views
from ..views.binding import BUTTON, QUIET, change_trigger, show
from ..views.markup import page_title
from ..views.problems import problem, settings_problem

_TICK_S = 1.0


def build(context: Context, page: gr.Blocks) -> None:
    """Components and their handlers."""
    view = _View(context)
    head = show(data_views.waiting, elem_id="data-head")
    act = gr.Textbox(visible="hidden", elem_id="data-act")
    with gr.Column(elem_classes="ft-box"):
        source = show(functools.partial(data_views.chooser, [], DATA_ENDINGS), elem_id="data-source")
        upload = gr.UploadButton(mark("Choose a file"), file_types=list(DATA_ENDINGS), elem_id="data-upload")
        status = show(elem_id="data-status")
    with gr.Row(elem_id="data-two"):
        with gr.Column(elem_classes="ft-box"):
            problems = show(lambda: f"<h2>{tr('Problems')}</h2>", elem_id="data-problems")
            lengths = show(elem_id="data-lengths")
        with gr.Column(elem_classes="ft-box"):
            row = show(lambda: f"<h2>{tr('A row, as the model sees it')}</h2>", elem_id="data-row")
    show(lambda: f'<p class="ft-next"><a class="ft-button primary" href="/fit">{tr("Next: Fit")}</a></p>')
    asked = change_trigger("data-asked")
    page.load(view.open, None, [source, asked], **QUIET)
    asked.change(view.look, None, [head, problems, row, lengths, status], **QUIET)
    gr.Timer(_TICK_S).tick(view.tick, None, asked, **QUIET)
    act.change(view.act, act, [status, row, asked], **QUIET)
    upload.upload(view.upload, upload, [status, asked], **BUTTON)


class _View:
    def __init__(self, context: Context) -> None:
        self.context = context

    def open(self) -> list[str]:
        """What data there is, and the draft's stamp."""
        self.context.planner.warm()
        return [data_views.chooser(local_datasets(self.context.workspace), DATA_ENDINGS), self.tick()]

    def tick(self) -> str:
        """The draft's stamp: another tab may have changed it."""
        return self.context.draft.stamp

    def look(self) -> list[Any]:
        """Read the data as a run would, and show it."""
        edited = self.context.draft.read()
        empty = [page_title("Data"), f"<h2>{tr('Problems')}</h2>", "", ""]
        if edited.recipe is None:
            return [*empty, settings_problem(edited.problems, edited.fix)]
        try:
            answer = self.context.planner.call("look", recipe=edited.text)
        except FinetuneError as error:
            return [*empty, problem(error.title, error.problems, error.fix)]
        return [
            data_views.head(answer, edited.recipe), data_views.problems(problems_of(answer), answer, edited.recipe),
            data_views.marked(answer), data_views.lengths(answer, edited.recipe), "",
        ]  # fmt: skip

    def upload(self, path: str | None) -> list[Any]:
        try:
            return self._changed(choose_data(self.context.draft, take_upload(self.context.workspace, path)))
        except FinetuneError as error:
            return [problem(tr("This file can't be used"), error.problems, error.fix), gr.skip()]

    def act(self, message: str) -> list[Any]:
        """What a button asks for: what is said of it, the row, and the draft's stamp."""
        try:
            action = json.loads(message)
            if "row" in action or "walk" in action:
                return ["", self._row(action), gr.skip()]
            status, asked = self._changed(self._change(action))
        except FinetuneError as error:
            return [problem(error.title, error.problems, error.fix), gr.skip(), gr.skip()]
        except (ValueError, KeyError, IndexError, AttributeError, TypeError):  # no message of this page
            return [gr.skip()] * 3
        return [status, gr.skip(), asked]

    def _row(self, action: dict[str, Any]) -> str:
        if "row" in action:
            text, index = self.context.draft.read().text, int(action["row"])
            return data_views.marked(self.context.planner.call("row", recipe=text, index=index))
        number, at = int(action["walk"]), int(action["at"])
        kind = self._problems()[number]
        return data_views.refused_row(number, at, kind, source_text(self.context.workspace.root, kind.rows[at]))

    def _change(self, action: dict[str, Any]) -> Edited:
        """Change the draft. Raises KeyError for what is none of this page's actions."""
        draft = self.context.draft
        if action.get("leave_out"):
            return draft.change(dataset__on_bad_rows="skip")
        if "correct" in action:
            rows = self._problems()[int(action["correct"])].rows
            return draft.change(dataset__path=with_roles_corrected(self.context.workspace, rows))
        if "hold_out" in action:
            share = float(action["hold_out"])
            return draft.change(dataset__test_split_size=int(share) if share >= 1 or not share else share)
        if "template" in action:
            return draft.change(chat_template=str(action["template"]) or None)
        return choose_data(draft, str(action["data"]))

    def _problems(self) -> list[Problem]:
        return problems_of(self.context.planner.call("look", recipe=self.context.draft.read().text))

    def _changed(self, edited: Edited) -> list[Any]:
        refusal = settings_problem(edited.problems, edited.fix) if edited.problems else ""
        return [refusal, self.context.draft.stamp]
