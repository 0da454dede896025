"""The tab Chat of a run: its base and tuned model answer a question side by side."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from finetune.data.call_syntax import Call
from finetune.data.pictures.display import small_copy
from finetune.data.pictures.limits import MAX_PICTURES
from finetune.data.pictures.source import BadPicture, PictureSource
from finetune.errors import FinetuneError, PackagesError
from finetune.planner.plan import Plan
from finetune.run.directory import RunDirectory
from finetune.run.state import is_alive
from finetune.units import format_bytes

from ..chat.chats import MODELS, Answer, Done, Model, Turn
from ..chat.pictures import keep_picture, kept_pictures
from ..context import Context
from ..language import mark, tr
from ..views.binding import BUTTON, QUIET, change_trigger, fingerprint, show
from ..views.markup import as_on_page, inert, note
from ..views.pictures import small_pictures
from ..views.problems import problem

#: Seconds between two looks at the conversation.
TICK_S = 0.5
_MOST_TOKENS = 128
_QUESTION_CHARACTERS = 8000
_WHO: dict[str, tuple[Model, ...]] = {
    mark("Base and tuned"): MODELS, mark("Tuned"): ("tuned",), mark("Base"): ("base",)
}  # fmt: skip


def build(context: Context, name: gr.Textbox, timer: gr.Timer) -> gr.Column:
    """The tab for the run called `name`; it is up to date while the timer ticks."""
    with gr.Column(elem_classes="ft-pane ft-pane-chat") as pane:
        _lay_out(_View(context), name, timer)
    return pane


def _lay_out(view: _View, name: gr.Textbox, timer: gr.Timer) -> None:
    """The conversation, and the box for a message."""
    warning = show(elem_id="chat-warning")
    turns = show(elem_id="chat-turns")
    with gr.Column(elem_classes="ft-box", elem_id="chat-box"):
        question = gr.Textbox(
            label=mark("Your message"), info=mark("Enter sends, Shift and Enter begin a new line"), lines=1, max_lines=8,
            max_length=_QUESTION_CHARACTERS, elem_id="chat-question",
        )  # fmt: skip
        with gr.Row(elem_classes="ft-controls"):
            who = gr.Dropdown(list(_WHO), value="Base and tuned", label=mark("Who answers"), elem_id="chat-who", scale=0)
            remove = gr.Button(mark("Remove the pictures"), elem_id="chat-without", scale=0, visible=False)
            clear = gr.Button(mark("New conversation"), elem_id="chat-clear", scale=0)
            stop = gr.Button(mark("Stop"), elem_id="chat-stop", interactive=False, scale=0)
            send = gr.Button(mark("Send"), variant="primary", elem_id="chat-send", scale=0)
        pictures = show(elem_id="chat-pictures")
        upload = gr.UploadButton(mark("Add a picture"), file_types=["image"], elem_id="chat-picture")
        waiting = gr.Textbox(visible="hidden", elem_id="chat-waiting")
        status = show(elem_id="chat-status")
        with gr.Accordion(mark("System prompt and sampling"), open=False, elem_id="chat-settings"):
            system = gr.Textbox(label=mark("System prompt"), lines=2, max_length=_QUESTION_CHARACTERS, elem_id="chat-system")
            with gr.Row(elem_classes="ft-controls"):
                most = gr.Slider(16, 1024, value=_MOST_TOKENS, step=16, label=mark("Max new tokens"), elem_id="chat-most")
                temperature = gr.Slider(
                    0, 2, value=0, step=0.05, label=mark("Temperature, 0 takes the likeliest token"), elem_id="chat-temperature"
                )
                top_p = gr.Slider(0.05, 1, value=1, step=0.05, label=mark("Top p"), elem_id="chat-top-p")
                seed = gr.Number(label=mark("Seed"), value=0, minimum=0, precision=0, elem_id="chat-seed")
    changed = change_trigger()
    asked = [name, question, most, system, temperature, top_p, seed, waiting, who]
    name.change(view.tick, [name, waiting], changed, **QUIET)
    timer.tick(view.tick, [name, waiting], changed, **QUIET)
    changed.change(view.show, [name, waiting], [turns, warning, stop, pictures, remove], **QUIET)
    send.click(view.ask, asked, [question, status, waiting], **BUTTON)
    question.submit(view.ask, asked, [question, status, waiting], **BUTTON)
    upload.upload(view.add_picture, [waiting, upload], [waiting, status], **BUTTON)
    remove.click(lambda: "", None, waiting, **BUTTON)
    stop.click(view.stop, name, status, **BUTTON)
    clear.click(view.clear, name, status, **BUTTON)


class _View:
    def __init__(self, context: Context) -> None:
        self.context = context

    def tick(self, name: str | None, waiting: str) -> str:
        return fingerprint(name, self._shown(name, waiting))

    def show(self, name: str | None, waiting: str) -> list[Any]:
        """The conversation, the memory warning, whether there is an answer to stop, and the pictures of the next message."""
        shown, warning, answering, pictures = self._shown(name, waiting)
        return [shown, warning, gr.Button(interactive=answering), pictures, gr.Button(visible=bool(waiting))]

    def add_picture(self, waiting: str, path: str | None) -> list[str]:
        names = waiting.split()
        if len(names) >= MAX_PICTURES:
            return [waiting, note(tr("A message has at most {n} pictures.", n=MAX_PICTURES), "warn")]
        try:
            return [" ".join([*names, keep_picture(self.context.chats.pictures, path or "")]), ""]
        except BadPicture as error:
            problems = [f"{Path(path or '').name} {error}"]
            return [waiting, problem(tr("No picture that can be read"), problems, tr("Give another file."))]
        except PackagesError as error:
            return [waiting, problem(tr("Pictures can't be read here"), error.problems, error.fix)]
        except OSError as error:
            fix = tr("Free some space on the disk of the runs.")
            return [waiting, problem(tr("The picture can't be kept"), [str(error)], fix)]

    def _pictures(self, names: Sequence[str]) -> str:
        return small_pictures([_small_copy(picture) for picture in kept_pictures(self.context.chats.pictures, names)])

    def _shown(self, name: str | None, waiting: str) -> tuple[str, str, bool, str]:
        run = self.context.workspace.run(name)
        if run is None:
            return "", "", False, ""
        turns = self.context.chats.turns(run)
        answering = bool(turns) and not turns[-1].done and self.context.chats.is_answering(run)
        if turns and not answering and not turns[-1].done:  # the app was killed before the answer was complete
            turns[-1].done = Done(id=turns[-1].question.id)
        try:
            plan = self.context.lives.of(run).plan()
        except (FinetuneError, OSError, ValueError):  # the chat itself reports an unreadable plan
            return _conversation(turns, self._pictures), "", answering, ""
        offloading = note(as_on_page(plan.layer_copies.generation_summary), "warn") if plan.layer_copies else ""
        pictures = _add_picture() + self._pictures(waiting.split()) if plan.settings.vision else ""
        return _conversation(turns, self._pictures), offloading + self._warning(run, plan), answering, pictures

    def ask(  # None: a field of the closed panel
        self, name: str | None, question: str, most: float | None, system: str | None,
        temperature: float | None, top_p: float | None, seed: float | None, waiting: str, who: str,
    ) -> list[Any]:  # fmt: skip
        """Send the message to the chat's process; the answers come with the ticks."""
        run = self.context.workspace.run(name)
        if run is None or not question.strip():
            return [gr.skip(), note(tr("Write a message.")), gr.skip()]
        if not has_adapter(run):
            problems = [tr("{run} has no adapter or checkpoint", run=run.path.name)]
            shown = problem(tr("No model to chat with yet"), problems, tr("Wait for its first checkpoint."))
            return [gr.skip(), shown, gr.skip()]
        self.context.chats.ask(
            run, question[:_QUESTION_CHARACTERS], int(most or _MOST_TOKENS), models=_WHO[who],
            system=(system or "").strip(), pictures=waiting.split(),
            temperature=temperature or 0.0, top_p=top_p or 1.0, seed=int(seed or 0),
        )  # fmt: skip
        return ["", "", ""]

    def stop(self, name: str | None) -> str:
        if run := self.context.workspace.run(name):
            self.context.chats.stop(run)
        return ""

    def clear(self, name: str | None) -> str:
        """Start a new conversation and unload the model."""
        if run := self.context.workspace.run(name):
            self.context.chats.clear(run)
        return ""

    def _warning(self, run: RunDirectory, plan: Plan) -> str:
        busy = next((other for other in self.context.workspace.list_runs() if is_alive(other)), None)
        if busy is None or self.context.chats.is_running(run):
            return ""
        training = self.context.lives.of(busy).plan()
        if training.forecast is None or plan.forecast is None:
            return note(
                tr(
                    "{run} is training, and there is no forecast of whether both fit. A message here may make it run out of "
                    "memory.", run=busy.path.name,
                ), "warn",
            )  # fmt: skip
        load = plan.forecast.peaks.get("load", plan.forecast.parts.get("weights", 0))
        both, budget = training.forecast.peak_high_bytes + load, training.usable_bytes
        fits = both <= budget
        text = tr(
            "{run} is training; forecast for both: {size} of {budget}, it fits." if fits
            else "{run} is training; forecast for both: {size} of {budget}, it does not fit.",
            run=busy.path.name, size=format_bytes(both), budget=format_bytes(budget),
        )  # fmt: skip
        return note(text, "" if fits else "bad")


def _add_picture() -> str:
    text = tr("Add a picture, or drop one")
    return f'<button type="button" class="ft-act ft-plain" data-pick="chat-picture">{text}</button>'


def has_adapter(run: RunDirectory) -> bool:
    """Whether there is anything to answer with."""
    return run.adapter.is_dir() or any(run.checkpoints.glob("checkpoint-*"))


@functools.lru_cache(maxsize=256)
def _small_copy(picture: PictureSource) -> dict[str, Any]:
    return small_copy(picture)


def _conversation(turns: list[Turn], pictures: Callable[[Sequence[str]], str] = lambda _: "") -> str:
    if not turns:
        return note(tr("Send a message: the models answer it side by side, one after the other, with the same settings."))
    shown = []
    for turn in turns:
        sides = "".join(_answer_column(turn, model) for model in turn.question.models)
        error = f'<p class="ft-note bad" role="alert">{inert(turn.done.error)}</p>' if turn.done and turn.done.error else ""
        question = f"<b>{tr('you')}</b>{pictures(turn.question.pictures)}<p>{inert(turn.question.text, 10_000)}</p>"
        shown.append(f'<li><div class="ft-turn user">{question}</div><div class="ft-sides">{sides}</div>{error}</li>')
    busy = "false" if turns[-1].done else "true"
    return f'<ol class="ft-chat" aria-live="polite" aria-busy="{busy}">{"".join(shown)}</ol>'


def _answer_column(turn: Turn, model: Model) -> str:
    answer = turn.answers.get(model)
    if answer is None:
        piece = turn.partial.get(model)
        thought, so_far = (piece.thought, inert(piece.text, 20_000)) if piece else ("", "")
        waiting = "" if so_far else f" {tr('waiting')}"
        text = (so_far or tr("no answer")) if turn.done else f'{so_far}<span class="ft-busy"></span>{waiting}'
        below = ""
    else:
        thought = answer.thought
        text = inert(answer.text, 20_000) or ("" if answer.calls else f"<em>{tr('empty answer')}</em>")
        below = f'{"".join(map(_call, answer.calls))}<small class="ft-note">{_pace(answer)}</small>'
    thinking = f'<p class="ft-faint">{inert(thought, 20_000)}</p>' if thought else ""
    return f'<div class="ft-turn {model}"><b>{tr(model)}</b>{thinking}<p>{text}</p>{below}</div>'


def _pace(answer: Answer) -> str:
    parts = [tr("{n} tokens", n=f"{answer.tokens:,}")]
    if answer.tokens_per_s:
        parts.append(tr("{rate} tokens/s", rate=f"{answer.tokens_per_s:.1f}"))
    return ", ".join([*parts, tr("stopped")] if answer.stopped else parts)


def _call(call: Call) -> str:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    rows = arguments.items() if isinstance(arguments, dict) else [("", arguments)]
    values = "".join(
        f"<dt>{inert(key)}</dt><dd>{inert(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))}</dd>"
        for key, value in rows
    )
    return f'<div class="ft-call"><b>{tr("calls {tool}", tool=inert(name))}</b><dl>{values}</dl></div>'
