"""Fit: what quantising costs on the held-out rows, measured by a process of its own while the page goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import gradio as gr

from finetune.errors import FinetuneError
from finetune.units import format_seconds

from ..background.tasks import Task
from ..language import tr
from ..views.binding import BUTTON, QUIET
from ..views.markup import note
from ..views.problems import problem

if TYPE_CHECKING:
    from ..context import Context


def build(context: Context, components: list[Any]) -> None:
    """Connect the button, the answer and the timer."""
    task, (button, _, timer) = Task(context.workspace.folder("measured")), components
    button.click(lambda: press(context, task), None, components, **BUTTON)
    timer.tick(lambda: tick(task), None, components, **QUIET)


def press(context: Context, task: Task) -> list[Any]:
    """Measure the current draft; end a measurement that is running."""
    try:
        if not task.end():
            path = task.path / "recipe.yaml"
            path.write_text(context.draft.read().text, encoding="utf-8")
            context.tasks.begin(task, "plan", str(path), "--measure-quantisation", "--json")
    except OSError as error:  # a full disk, among others
        return [gr.skip(), problem(FinetuneError.title, [str(error)]), gr.Timer(active=False)]
    return tick(task)


def tick(task: Task) -> list[Any]:
    """The button, what is known by now, and whether to look again."""
    status, result = task.status(), task.result() or {}
    if status and status["state"] == "running":
        text = tr("Measuring for {time} …", time=format_seconds(time.time() - status["began_s"]))
        return [gr.Button(tr("Stop measuring")), note(text), gr.Timer(active=True)]
    if "quantisation" in result:
        shown = note(result["quantisation"]["sentence"])
    elif error := FinetuneError.written_by(task.output()):
        shown = problem(error.title, error.problems, error.fix)
    else:
        shown = note(tr("Measuring was stopped."))
    return [gr.Button(tr("Measure what 4-bit and 8-bit weights cost")), shown, gr.Timer(active=False)]
