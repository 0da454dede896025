"""Models: the adapters, merged models and GGUF files of all runs, with size, place and scores."""

from __future__ import annotations

import functools
from pathlib import Path

import gradio as gr

from ..context import Context
from ..views.binding import QUIET, show
from ..views.markup import page_title
from ..views.models import ModelFile, models_of, models_table

_TICK_S = 5.0
_LISTED = 200


def build(context: Context, page: gr.Blocks) -> None:
    """Components and their handlers."""
    listed = show(functools.partial(page_title, "Models"), elem_id="models-list")

    def shown() -> str:
        files: list[ModelFile] = []
        for run in context.workspace.list_runs()[:_LISTED]:
            base = Path(str(context.lives.of(run).plan().settings.model_name_or_path)).name
            files += models_of(run, base, context.scores.of(run))
        return models_table(files, context.workspace.root)

    page.load(shown, None, listed, **QUIET)
    gr.Timer(_TICK_S).tick(shown, None, listed, **QUIET)
