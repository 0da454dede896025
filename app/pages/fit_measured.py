"""Fit: what quantising costs on the held-out rows, measured by a process of its own while the page goes on."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gradio as gr
import psutil

from finetune.card.visible import environment_with_gpus
from finetune.errors import FinetuneError
from finetune.recipe import write_recipe
from finetune.units import format_seconds

from ..language import tr
from ..views.binding import BUTTON, QUIET
from ..views.markup import interval_text, note, table
from ..views.problems import problem
from ..views.words import rows

if TYPE_CHECKING:
    from ..context import Context
    from .fit_layout import Measure


def build(context: Context, components: Measure) -> None:
    """Connect the components."""
    measurements = _Measurements(context)
    shown = [components.button, components.answer, components.timer]
    components.button.click(measurements.press, None, shown, **BUTTON)
    components.timer.tick(measurements.tick, None, shown, **QUIET)
    atexit.register(measurements.end)


class _Measurements:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._newest: subprocess.Popen[bytes] | None = None
        self._folder, self._began_s, self._is_ended = Path(), 0.0, False

    def press(self) -> list[Any]:
        """Measure for the draft as it is now; end one that goes on."""
        if self._is_measuring():
            self.end()
            return self.tick()
        recipe = self._context.draft.read().recipe
        if recipe is None:
            return [gr.skip(), note(tr("The recipe has settings to correct.")), gr.Timer(active=False)]
        try:
            self._start(write_recipe(recipe))
        except OSError as error:  # a full disk, among others
            return [gr.skip(), problem(FinetuneError.title, [str(error)]), gr.Timer(active=False)]
        return self.tick()

    def _is_measuring(self) -> bool:
        return self._newest is not None and self._newest.poll() is None

    def _start(self, recipe: str) -> None:
        folder = self._context.workspace.folder("measured")
        path = folder / "recipe.yaml"
        path.write_text(recipe, encoding="utf-8")
        with (folder / "output.txt").open("wb") as output, (folder / "log.txt").open("wb") as log:
            self._newest = subprocess.Popen(
                [sys.executable, "-P", "-m", "finetune", "plan", str(path), "--measure", "--json"], stdout=output, stderr=log,
                stdin=subprocess.DEVNULL, cwd=self._context.workspace.root, env=environment_with_gpus(),
            )  # fmt: skip
        self._folder, self._began_s, self._is_ended = folder, time.monotonic(), False

    def end(self) -> None:
        """End the measurement that goes on, with the processes that it started."""
        if self._newest is not None and self._newest.poll() is None:
            self._is_ended = True
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(self._newest.pid).children(recursive=True):
                    child.terminate()
            self._newest.terminate()
            self._newest.wait()

    def tick(self) -> list[Any]:
        """The button, what is known by now, and whether to look again."""
        if self._is_measuring():
            text = tr("Measuring for {time} …", time=format_seconds(time.monotonic() - self._began_s))
            return [gr.Button(tr("Stop measuring")), note(text), gr.Timer(active=True)]
        shown = note(tr("Measuring was stopped.")) if self._is_ended else self._shown() if self._newest else ""
        return [gr.Button(tr("Measure what 4-bit and 8-bit weights cost")), shown, gr.Timer(active=False)]

    def _shown(self) -> str:
        output, log = ((self._folder / name).read_text("utf-8", errors="replace") for name in ("output.txt", "log.txt"))
        with suppress(ValueError, KeyError):
            return _costs(json.loads(output)["quantisation"])
        reason = log.strip().rpartition("\n")[2] or tr("its process was killed")
        error = FinetuneError.written_by(output) or FinetuneError(reason)
        return problem(error.title, error.problems, error.fix)


def _costs(measured: dict[str, Any]) -> str:
    lines = [
        [
            entry["label"], f"{entry['loss']:.4f}",
            "" if entry["cost"] is None else f"{entry['cost']:+.4f} ({interval_text(entry['cost_low'], entry['cost_high'])})",
        ]
        for entry in measured["formats"]
    ]  # fmt: skip
    columns = [tr("Weights"), ">" + tr("Held-out loss"), ">" + tr("Cost (95 % interval)")]
    caption = tr("The base model before training, on {rows}", rows=rows(measured["rows"]))
    left_out = "".join(note(str(text)) for text in measured["left_out"])
    return f'<div role="status">{table(columns, lines, caption)}{left_out}</div>'
