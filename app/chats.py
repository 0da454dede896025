"""Conversations with a run's models, and the worker process that answers: `python -m app.chats RUN FILE`"""

from __future__ import annotations

import functools
import re
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from finetune.data.pictures.placement import message_with_pictures
from finetune.data.pictures.source import BadPicture, PictureSource, picture_file
from finetune.data.tool_calls import assistant_message
from finetune.errors import CommandError, FinetuneError, PackagesError
from finetune.events import Event, EventWriter, read_events
from finetune.run.directory import RunDirectory

from .worker import Work, Worker, serve
from .workspace import Workspace

if TYPE_CHECKING:
    from finetune.evaluate.answerer import Answerer

_IDLE_S = 600.0  # without a question; then the process ends and frees its memory
_PICTURES_FOLDER = "pictures"  # of all conversations
_PICTURE_NAME = re.compile("[0-9a-f]{40}")  # an image file is named by its digest
ModelName = Literal["base", "tuned"]
MODELS: tuple[ModelName, ...] = ("base", "tuned")


@dataclass(frozen=True)
class Answer:
    """Answer of a model."""

    text: str = ""
    thought: str = ""
    #: None while the answer grows.
    tokens: int | None = None
    tokens_per_s: float | None = None
    stopped: bool = False
    calls: tuple[dict[str, Any], ...] = ()


class Turn(Event, kind="turn"):
    """A question with its answers so far."""

    id: str
    text: str
    models: tuple[ModelName, ...] = MODELS
    #: File names.
    pictures: tuple[str, ...] = ()
    answers: dict[ModelName, Answer] = field(default_factory=dict)
    #: Reason for missing answers.
    error: str = ""


def _read_turns(path: Path) -> list[Turn]:
    # a turn is written again with each answer: the newest line counts
    return list({turn.id: turn for turn in read_events(path, {Turn.kind: Turn}) if isinstance(turn, Turn)}.values())


class Chats:
    """Conversations by run, and one worker with a run's models."""

    def __init__(self, workspace: Workspace) -> None:
        self._root, self._folder = workspace.root, workspace.folder("chat")
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._worker_run_name = ""
        self._asking = ThreadPoolExecutor(1)  # answers keep the order of questions
        #: Turns without all their answers, by id.
        self.answering: dict[str, Turn] = {}
        self._is_stopped = False

    def ask(
        self, run: RunDirectory, text: str, max_new_tokens: int, *, models: Sequence[ModelName] = MODELS,
        pictures: Sequence[str] = (), **sampling: Any,
    ) -> Future[None]:  # fmt: skip
        """Ask without waiting. `sampling`: see `Conversation.answer`."""
        turn = Turn(id=uuid.uuid4().hex, text=text, models=tuple(models), pictures=tuple(pictures))
        with self._lock:
            worker = self._worker_for(run)
        # in a file: all tabs show one conversation, and closing a tab loses nothing
        writer = EventWriter(self.path(run))
        writer.emit(turn)
        self.answering[turn.id] = turn
        return self._asking.submit(self._collect_answers, worker, writer, turn, max_new_tokens=max_new_tokens, **sampling)

    def _collect_answers(self, worker: Worker, writer: EventWriter, turn: Turn, **generation: Any) -> None:
        error, answers, self._is_stopped = "", turn.answers, False
        try:
            for model in turn.models:
                answers[model] = Answer()
                question = {"model": model, "text": turn.text, "pictures": turn.pictures, **generation}
                append = functools.partial(_append_piece, answers, model)
                try:
                    answers[model] = Answer(**worker.call("answer", report=append, **question))
                except FinetuneError as failure:
                    error = " ".join([*failure.problems, failure.fix])
                    partial_answer = answers.pop(model)
                    if partial_answer != Answer():
                        # None would mean that the answer still grows; 0 stands for an unknown count
                        answers[model] = replace(partial_answer, tokens=0, stopped=True)
                writer.emit(replace(turn, error=error))
                if error or self._is_stopped:
                    break
        finally:
            del self.answering[turn.id]

    def stop(self, run: RunDirectory) -> None:
        if self._worker is not None and self.is_running(run):
            self._is_stopped = True
            self._worker.cancel("answer")

    def turns(self, run: RunDirectory) -> list[Turn]:
        return [self.answering.get(turn.id, turn) for turn in _read_turns(self.path(run))]

    def clear(self, run: RunDirectory) -> None:
        if self.path(run).exists():
            # kept: a click must not destroy a conversation
            self.path(run).rename(self._folder / f"{run.path.name}-{time.time_ns()}.old")
        self.close()

    def path(self, run: RunDirectory) -> Path:
        return self._folder / f"{run.path.name}.jsonl"

    @property
    def pictures(self) -> Path:
        return self._folder / _PICTURES_FOLDER

    def is_running(self, run: RunDirectory) -> bool:
        return self._worker_run_name == run.path.name and self._worker is not None and self._worker.is_alive

    def close(self) -> None:
        with self._lock:
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def _worker_for(self, run: RunDirectory) -> Worker:
        if self._worker is None or self._worker_run_name != run.path.name:
            if self._worker is not None:
                self._worker.close()
            arguments, log = (str(run.path), str(self.path(run))), self._folder / "log.txt"
            self._worker = Worker(self._root, ".chats", *arguments, log=log, tries=1)
            self._worker_run_name = run.path.name
        return self._worker


def _append_piece(answers: dict[ModelName, Answer], model: ModelName, piece: tuple[str, bool]) -> None:
    text, is_thought = piece
    answer = answers[model]
    answers[model] = replace(answer, thought=answer.thought + text) if is_thought else replace(answer, text=answer.text + text)


def store_picture(folder: Path, upload: str) -> str:
    """Move an upload into a folder; return its new name. Raises BadPicture or PackagesError."""
    name = picture_file(Path(upload)).digest
    folder.mkdir(exist_ok=True)
    shutil.move(upload, folder / name)
    return name


def stored_pictures(folder: Path, names: Iterable[str]) -> list[PictureSource]:
    """Return the intact images of these names."""
    pictures = [_stored_picture(folder / name) for name in names if _PICTURE_NAME.fullmatch(name)]
    return [picture for picture in pictures if picture is not None]


@functools.lru_cache(maxsize=256)
def _stored_picture(path: Path) -> PictureSource | None:
    try:
        picture = picture_file(path)
    except (BadPicture, PackagesError):
        return None
    # the name is the stored image's digest: drop a file that was changed before its first read
    return picture if picture.digest == path.name else None


class Conversation:
    """A conversation in the worker process, read from its file."""

    def __init__(self, run: RunDirectory, path: Path) -> None:
        self._run, self._path, self._folder = run, path, path.with_name(_PICTURES_FOLDER)

    @functools.cached_property
    def _answerer(self) -> Answerer:
        from finetune.evaluate.answerer import Answerer

        return Answerer(self._run)

    def answer(
        self, work: Work, model: ModelName, text: str, pictures: Sequence[str], *, max_new_tokens: int, system: str = "",
        temperature: float = 0.0, top_p: float = 1.0, seed: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        """Send (text, is thought) pieces to `work`; return the fields of an `Answer`."""
        from finetune.model.generate import Sampling

        new_images = stored_pictures(self._folder, pictures)
        if len(new_images) < len(pictures):
            raise CommandError("an image of this message was removed or changed", "Add it again.")
        earlier_messages, earlier_images = self.history(model)
        messages = [*earlier_messages, message_with_pictures(text, len(new_images))]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        if images := [*earlier_images, *new_images]:
            self._answerer.require_vision()
        with self._answerer.using(model):
            # `send`, not `report`, which would drop the text so far of a stopped answer
            reply, answer = self._answerer.stream(
                messages, lambda *piece: work.send(piece), tools=(), pictures=images,
                max_new_tokens=max_new_tokens, stopped=work.is_cancelled, sampling=Sampling(temperature, top_p, seed),
            )  # fmt: skip
        return {
            "text": answer.text, "tokens": reply.tokens, "tokens_per_s": reply.tokens_per_s, "stopped": reply.stopped,
            "calls": answer.calls, "thought": answer.thought,
        }  # fmt: skip

    def history(self, model: ModelName) -> tuple[list[dict[str, Any]], list[PictureSource]]:
        """Return the earlier messages with the model's own answers, and their images."""
        messages: list[dict[str, Any]] = []
        images: list[PictureSource] = []
        for turn in _read_turns(self._path):
            if answer := turn.answers.get(model):
                pictures = stored_pictures(self._folder, turn.pictures)
                messages += [message_with_pictures(turn.text, len(pictures)), assistant_message(answer)]
                images += pictures
        return messages, images


if __name__ == "__main__":
    serve(Conversation(RunDirectory(Path(sys.argv[1])), Path(sys.argv[2])), _IDLE_S)
