"""Models: what the runs have made, adapters, merged models and GGUF files, with size, place, scores, and what is served now."""

from __future__ import annotations

import functools
from pathlib import Path

import gradio as gr

from finetune.run.directory import RunDirectory

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
        runs = context.workspace.list_runs()[:_LISTED]
        return models_table([model for run in runs for model in _of(context, run)], context.workspace.root)

    page.load(shown, None, listed, **QUIET)
    gr.Timer(_TICK_S).tick(shown, None, listed, **QUIET)


def _of(context: Context, run: RunDirectory) -> list[ModelFile]:
    base = Path(str(context.lives.of(run).plan().settings.model_name_or_path)).name
    return [
        ModelFile(run.path.name, base, kind, path, size, context.scores.of(run) if kind == "adapter" else "")
        for kind, path, size in models_of(run)
    ]  # fmt: skip
