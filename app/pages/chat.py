"""Tab Chat: base and tuned model answer side by side."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from finetune.data.pictures.source import MAX_PICTURES, BadPicture
from finetune.errors import CommandError, PackagesError
from finetune.planner.plan import Plan
from finetune.run.directory import RunDirectory
from finetune.run.state import is_alive

from ..chats import MODELS, Answer, Chats, ModelName, Turn, store_picture, stored_pictures
from ..language import mark, tr
from ..views.answers import pictures_of
from ..views.markup import Safe, inert, render
from ..web.followed import Context

_QUESTION_CHARACTERS, _ANSWER_CHARACTERS, _DEFAULT_NEW_TOKENS = 8000, 20_000, 128
#: Choices of who answers: label and models.
_WHO: dict[str, tuple[str, tuple[ModelName, ...]]] = {
    "both": (mark("Base and tuned"), MODELS), "tuned": (mark("Tuned"), ("tuned",)), "base": (mark("Base"), ("base",))
}  # fmt: skip


def pane(plan: Plan) -> str:
    """Return the form for a message."""
    return render("chat", vision=plan.settings.vision, who=[(name, tr(label)) for name, (label, _) in _WHO.items()])


def parts(context: Context, run: RunDirectory) -> dict[str, str]:
    """Return the conversation, memory warning and Stop button."""
    chats, follow, training_run = context.chats, context.lives.follow, None
    # a training run and a chat share the GPU's memory; no warning once this run's chat process runs
    if not chats.is_running(run):
        training_run = next(filter(is_alive, context.workspace.list_runs()), None)
    training_plan = follow(training_run).plan() if training_run else None
    turns = chats.turns(run)
    return {
        "turns": conversation(turns, chats),
        "warning": render("chat_warning", plan=follow(run).plan(), training_run=training_run, training_plan=training_plan),
        "stop": render("chat_stop", is_answering=bool(turns) and turns[-1].id in chats.answering),
    }  # fmt: skip


def conversation(turns: Sequence[Turn], chats: Chats) -> str:
    """Return messages and answers as HTML."""
    return render(
        "turns", turns=turns, pictures=functools.partial(_pictures_html, chats.pictures), calls=_tool_calls,
        answering=chats.answering, shortened=lambda text: Safe(inert(text, _ANSWER_CHARACTERS)),
    )  # fmt: skip


def ask(context: Context, run: RunDirectory, values: Mapping[str, Any]) -> None:
    """Send a message to the chat process. Raises CommandError or ValueError."""
    if not (question := str(values["question"]).strip()):
        raise CommandError(tr("Write a message."))
    if not has_adapter(run):
        raise CommandError(tr("{run} has no adapter or checkpoint", run=run.path.name), tr("Wait for its first checkpoint."))
    context.chats.ask(
        run, question[:_QUESTION_CHARACTERS], int(float(values["most"] or _DEFAULT_NEW_TOKENS)), models=_WHO[values["who"]][1],
        system=str(values["system"]).strip()[:_QUESTION_CHARACTERS], pictures=str(values.get("waiting", "")).split(),
        temperature=float(values["temperature"] or 0), top_p=float(values["top_p"] or 1), seed=int(float(values["seed"] or 0)),
    )  # fmt: skip


def add_picture(context: Context, upload: str, waiting: str) -> dict[str, str]:
    """Add an upload to `waiting`, the next message's images. Raises CommandError."""
    names = waiting.split()
    if len(names) >= MAX_PICTURES:
        raise CommandError(tr("A message can have at most {n} images.", n=MAX_PICTURES))
    path = context.uploaded(upload)
    try:
        names.append(store_picture(context.chats.pictures, str(path)))
    except BadPicture as error:
        raise CommandError(f"{path.name} {error}", tr("Give another file.")) from None
    except PackagesError as error:
        raise CommandError([tr("Images can't be read here"), *error.problems], error.fix) from None
    return {"waiting": " ".join(names), "pictures": _pictures_html(context.chats.pictures, names)}


def has_adapter(run: RunDirectory) -> bool:
    """Return whether a run can answer."""
    return run.adapter.is_dir() or any(run.checkpoints.glob("checkpoint-*"))


def _pictures_html(folder: Path, names: Sequence[str]) -> Safe:
    return pictures_of(folder / picture.digest for picture in stored_pictures(folder, names))


def _tool_calls(answer: Answer) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    # name of the tool, and name and value of each argument
    for call in answer.calls:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        # arguments that are no JSON object are shown as written
        rows = arguments.items() if isinstance(arguments, dict) else [("", arguments)]
        yield name, [(key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for key, value in rows]
