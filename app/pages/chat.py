"""Chat: the same question to two models, side by side; as a tab of a run to its base and tuned model, as a page to any two."""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from finetune.data.pictures.display import small_copy
from finetune.data.pictures.limits import MAX_PICTURES
from finetune.data.pictures.source import BadPicture, PictureSource
from finetune.errors import FinetuneError, PackagesError
from finetune.run.directory import RunDirectory
from finetune.run.state import is_alive
from finetune.units import format_bytes

from ..chat.chats import COMPARISON, MODELS, Model, Turn
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
        _lay_out(_View(context), name, timer, _who)
    return pane


def build_page(context: Context, page: gr.Blocks) -> None:
    """The page Chat: one question to any two models, of runs or their bases, with the same settings."""
    view = _View(context)
    show(lambda: f'<h1 class="ft-title" data-title="{tr("Chat")}">{tr("Chat")}</h1>')
    name, timer = gr.Textbox(COMPARISON, visible="hidden"), gr.Timer(TICK_S)
    page.load(view.offer, None, _lay_out(view, name, timer, _two_models), **QUIET)


def _who() -> list[Any]:
    """Which of a run's two models answer."""
    return [gr.Dropdown(list(_WHO), value="Base and tuned", label=mark("Who answers"), elem_id="chat-who", scale=0)]


def _two_models() -> list[Any]:
    return [
        gr.Dropdown(  # any value: after a restart of the app an open page has models that `offer` has not told it of
            [(mark("Nobody"), "")], value="", label=label, elem_id=f"chat-{identity}", scale=1, allow_custom_value=True
        )
        for label, identity in ((mark("First model"), "left"), (mark("Second model"), "right"))
    ]


def _lay_out(view: _View, name: gr.Textbox, timer: gr.Timer, choosers: Callable[[], list[Any]]) -> list[Any]:
    """The conversation, and the box for a message. Returns the components that choose who answers."""
    warning = show(elem_id="chat-warning")
    turns = show(elem_id="chat-turns")
    with gr.Column(elem_classes="ft-box", elem_id="chat-box"):
        question = gr.Textbox(
            label=mark("Your message"), info=mark("Enter sends, Shift and Enter begin a new line"), lines=1, max_lines=8,
            max_length=_QUESTION_CHARACTERS, elem_id="chat-question",
        )  # fmt: skip
        with gr.Row(elem_classes="ft-controls"):
            chosen = choosers()
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
    asked = [name, question, most, system, temperature, top_p, seed, waiting, *chosen]
    shown = [name, waiting, *chosen]
    name.change(view.tick, shown, changed, **QUIET)
    timer.tick(view.tick, shown, changed, **QUIET)
    changed.change(view.show, shown, [turns, warning, stop, pictures, remove], **QUIET)
    send.click(view.ask, asked, [question, status, waiting], **BUTTON)
    question.submit(view.ask, asked, [question, status, waiting], **BUTTON)
    upload.upload(view.add_picture, [waiting, upload], [waiting, status], **BUTTON)
    remove.click(lambda: "", None, waiting, **BUTTON)
    stop.click(view.stop, name, status, **BUTTON)
    clear.click(view.clear, name, status, **BUTTON)
    return chosen


class _View:
    def __init__(self, context: Context) -> None:
        self.context = context

    def offer(self, request: gr.Request) -> list[Any]:
        """Both lists of models: first the run that the address names, else the newest, beside its base."""
        runs = [run for run in self.context.workspace.list_runs() if has_adapter(run)]
        named = self.context.workspace.run(request.query_params.get("run"))
        first = named if named is not None and has_adapter(named) else next(iter(runs), None)
        bases = {self._base(run): run.path.name for run in [*reversed(runs), *([first] if first else [])]}
        tuned = [(run.path.name, f"tuned/{run.path.name}") for run in runs]
        labels = _labels(bases)
        offered = [*tuned, *((labels[base], f"base/{name}") for base, name in bases.items())]
        left, right = (f"{kind}/{first.path.name}" if first else "" for kind in ("tuned", "base"))
        return [
            gr.Dropdown(offered or [(tr("No run has a model yet"), "")], value=left),
            gr.Dropdown([(tr("Nobody"), ""), *offered], value=right),
        ]

    def _base(self, run: RunDirectory) -> str:
        try:
            return self.context.lives.of(run).plan().settings.model_name_or_path
        except (FinetuneError, OSError, ValueError):
            return tr("that of {run}", run=run.path.name)

    def _conversation_of(self, name: str | None) -> RunDirectory | None:
        workspace = self.context.workspace
        return RunDirectory(workspace.runs / COMPARISON) if name == COMPARISON else workspace.run(name)

    def _names(self, turns: list[Turn]) -> dict[Model, str]:
        models = dict.fromkeys(model for turn in turns for model in turn.models)
        split = {model: model.partition("/") for model in models}
        bases = {
            name: self._base(run)
            for kind, _, name in split.values()
            if kind == "base" and (run := self.context.workspace.run(name))
        }
        labels = _labels([*bases.values(), *(name for _, _, name in split.values())])
        return {
            model: tr(model) if not name else name if kind == "tuned" else labels[bases.get(name, name)]
            for model, (kind, _, name) in split.items()
        }

    def tick(self, name: str | None, waiting: str, *chosen: str) -> str:
        return fingerprint(name, self._shown(name, waiting, chosen))

    def show(self, name: str | None, waiting: str, *chosen: str) -> list[Any]:
        """The conversation, the memory warning, whether there is an answer to stop, and the pictures of the next message."""
        shown, warning, answering, pictures = self._shown(name, waiting, chosen)
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

    def _reads_pictures(self, name: str) -> bool:
        try:
            run = self.context.workspace.run(name)
            return run is not None and self.context.lives.of(run).plan().settings.vision is True
        except (FinetuneError, OSError, ValueError):
            return False

    def _pictures(self, names: Sequence[str]) -> str:
        return small_pictures([_small_copy(picture) for picture in kept_pictures(self.context.chats.pictures, names)])

    def _shown(self, name: str | None, waiting: str, chosen: Sequence[str]) -> tuple[str, str, bool, str]:
        run = self._conversation_of(name)
        if run is None:
            return "", "", False, ""
        turns = self.context.chats.turns(run)
        answering = bool(turns) and not turns[-1].done and self.context.chats.is_running(run)
        names = dict.fromkeys(_run_name(model, run) for model in _models(chosen))
        notes = "".join(map(self._offloading_note, names))
        pictures = _add_picture() + self._pictures(waiting.split()) if any(map(self._reads_pictures, names)) else ""
        return _conversation(turns, self._names(turns), self._pictures), notes + self._warning(run), answering, pictures

    def ask(  # None: a field of the closed panel
        self, name: str | None, question: str, most: float | None, system: str | None,
        temperature: float | None, top_p: float | None, seed: float | None, waiting: str, *chosen: str,
    ) -> list[Any]:  # fmt: skip
        """Send the message to the chat's process; the answers come with the ticks."""
        run = self._conversation_of(name)
        models = _models(chosen)
        if run is None or not models or not question.strip():
            return [gr.skip(), note(tr("Choose a model and write a message.")), gr.skip()]
        names = [_run_name(model, run) for model in models]
        runs = {name: self.context.workspace.run(name) for name in names}
        if missing := [name for name, run in runs.items() if run is None or not has_adapter(run)]:
            problems = [tr("{run} has no adapter or checkpoint", run=name) for name in missing]
            shown = problem(tr("No model to chat with yet"), problems, tr("Wait for its first checkpoint."))
            return [gr.skip(), shown, gr.skip()]
        self.context.chats.ask(
            run, question[:_QUESTION_CHARACTERS], int(most or _MOST_TOKENS), models=models,
            system=(system or "").strip(), pictures=waiting.split(),
            temperature=temperature or 0.0, top_p=top_p or 1.0, seed=int(seed or 0),
        )  # fmt: skip
        return ["", "", ""]

    def stop(self, name: str | None) -> str:
        run = self._conversation_of(name)
        if run is not None:
            self.context.chats.stop(run)
        return ""

    def clear(self, name: str | None) -> str:
        """Start a new conversation and unload the model."""
        run = self._conversation_of(name)
        if run is not None:
            self.context.chats.clear(run)
        return ""

    def _offloading_note(self, name: str) -> str:
        """What a token of a run's answer copies, where layers are offloaded; the chat itself reports an unreadable plan."""
        try:
            run = self.context.workspace.run(name)
            copies = self.context.lives.of(run).plan().layer_copies if run else None
        except (FinetuneError, OSError, ValueError):
            return ""
        return note(f"{name}: {as_on_page(copies.generation_summary)}", "warn") if copies else ""

    def _warning(self, run: RunDirectory) -> str:
        busy = next((other for other in self.context.workspace.list_runs() if is_alive(other)), None)
        if busy is None or self.context.chats.is_running(run):
            return ""
        name = busy.path.name
        if run.path.name == COMPARISON:
            return note(tr("{run} is training: a message here may make it run out of memory.", run=name), "warn")
        training, ours = self.context.lives.of(busy).plan(), self.context.lives.of(run).plan()
        if training.forecast is None or ours.forecast is None:
            return note(
                tr(
                    "{run} is training, and there is no forecast of whether both fit. A message here may make it run out of "
                    "memory.", run=name,
                ), "warn",
            )  # fmt: skip
        load = ours.forecast.peaks.get("load", ours.forecast.parts.get("weights", 0))
        both, budget = training.forecast.peak_high_bytes + load, training.usable_bytes
        fits = both <= budget
        text = tr(
            "{run} is training; forecast for both: {size} of {budget}, it fits." if fits
            else "{run} is training; forecast for both: {size} of {budget}, it does not fit.",
            run=name, size=format_bytes(both), budget=format_bytes(budget),
        )  # fmt: skip
        return note(text, "" if fits else "bad")


def _add_picture() -> str:
    text = tr("Add a picture, or drop one")
    return f'<button type="button" class="ft-act ft-plain" data-pick="chat-picture">{text}</button>'


def _models(chosen: Sequence[str]) -> tuple[Model, ...]:
    return _WHO.get(chosen[0]) or tuple(model for model in dict.fromkeys(chosen) if model)


def _run_name(model: Model, run: RunDirectory) -> str:
    """The run whose model it is: `run` for its own; what a person typed that is no model is the name of none."""
    kind, _, name = model.partition("/")
    return model if kind not in MODELS else name or run.path.name


def _labels(bases: Iterable[str]) -> dict[str, str]:
    counts = Counter(Path(base).name for base in dict.fromkeys(bases))
    return {base: tr("{name}, the base model", name=base if counts[Path(base).name] > 1 else Path(base).name) for base in bases}


def has_adapter(run: RunDirectory) -> bool:
    """Whether there is anything to answer with."""
    return run.adapter.is_dir() or any(run.checkpoints.glob("checkpoint-*"))


@functools.lru_cache(maxsize=256)
def _small_copy(picture: PictureSource) -> dict[str, Any]:
    return small_copy(picture)


def _conversation(
    turns: list[Turn], names: Mapping[Model, str], pictures: Callable[[Sequence[str]], str] = lambda _: ""
) -> str:
    if not turns:
        return note(tr("Send a message: the models answer it side by side, one after the other, with the same settings."))
    shown = []
    for turn in turns:
        sides = "".join(_answer_column(turn, model, names.get(model, model)) for model in turn.models)
        error = f'<p class="ft-note bad" role="alert">{inert(turn.error)}</p>' if turn.error else ""
        question = f"<b>{tr('you')}</b>{pictures(turn.pictures)}<p>{inert(turn.question, 10_000)}</p>"
        shown.append(f'<li><div class="ft-turn user">{question}</div><div class="ft-sides">{sides}</div>{error}</li>')
    busy = "true" if not turns[-1].done else "false"
    return f'<ol class="ft-chat" aria-live="polite" aria-busy="{busy}">{"".join(shown)}</ol>'


def _answer_column(turn: Turn, model: Model, name: str) -> str:
    caption = f'<small class="ft-note">{inert(turn.notes[model])}</small>' if model in turn.notes else ""
    calls = "".join(_call(call) for call in turn.calls.get(model, ()))
    kind = inert(model.partition("/")[0])
    return f'<div class="ft-turn {kind}"><b>{inert(name)}</b><p>{_answer(turn, model)}</p>{calls}{caption}</div>'


def _call(call: Mapping[str, Any]) -> str:
    arguments = call.get("arguments")
    rows = arguments.items() if isinstance(arguments, dict) else [("", arguments)]
    values = "".join(
        f"<dt>{inert(key)}</dt><dd>{inert(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))}</dd>"
        for key, value in rows
    )
    return f'<div class="ft-call"><b>{tr("calls {tool}", tool=inert(call.get("name", "")))}</b><dl>{values}</dl></div>'


def _answer(turn: Turn, model: Model) -> str:
    if model in turn.answers:
        return inert(turn.answers[model], 20_000) or ("" if model in turn.calls else f"<em>{tr('empty answer')}</em>")
    so_far = inert(turn.partial.get(model, ""), 20_000)
    if turn.done:
        return so_far or tr("no answer")
    waiting = "" if so_far else f" {tr('waiting')}"
    return f'{so_far}<span class="ft-busy"></span>{waiting}'
