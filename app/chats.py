"""Conversations with models of runs, and the process that answers, a worker: `python -m app.chats RUN FILE`"""

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

#: Seconds without a question after which the chat process ends and frees its memory.
_IDLE_S = 600.0
#: Folder of the images of all conversations.
PICTURES = "pictures"
#: An image is named by its digest.
_PICTURE = re.compile("[0-9a-f]{40}")
Model = Literal["base", "tuned"]
MODELS: tuple[Model, ...] = ("base", "tuned")


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
    models: tuple[Model, ...] = MODELS
    #: File names.
    pictures: tuple[str, ...] = ()
    answers: dict[Model, Answer] = field(default_factory=dict)
    #: Reason for missing answers.
    error: str = ""


def _read_turns(path: Path) -> list[Turn]:
    # a turn is written again with each answer: the newest line counts
    return list({turn.id: turn for turn in read_events(path, {Turn.kind: Turn}) if isinstance(turn, Turn)}.values())


class Chats:
    """Conversations, and one process with a run's models."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace, self._folder = workspace, workspace.folder("chat")
        self._lock = threading.Lock()
        self._worker: Worker | None = None
        self._name = ""
        self._asking = ThreadPoolExecutor(1)  # answers keep the order of questions
        #: Turns without all their answers, by id.
        self.answering: dict[str, Turn] = {}
        self._is_stopped = False

    def ask(
        self, run: RunDirectory, text: str, max_new_tokens: int, *, models: Sequence[Model] = MODELS,
        pictures: Sequence[str] = (), **how: Any,
    ) -> Future[None]:  # fmt: skip
        """Ask a question without waiting."""
        turn = Turn(id=uuid.uuid4().hex, text=text, models=tuple(models), pictures=tuple(pictures))
        with self._lock:
            worker = self._worker_of(run)
        # in a file: all tabs show one conversation, and closing a tab loses nothing
        writer = EventWriter(self.path(run))
        writer.emit(turn)
        self.answering[turn.id] = turn
        return self._asking.submit(self._wait, worker, writer, turn, max_new_tokens=max_new_tokens, **how)

    def _wait(self, worker: Worker, writer: EventWriter, turn: Turn, **how: Any) -> None:
        error, answers, self._is_stopped = "", turn.answers, False
        try:
            for model in turn.models:
                answers[model] = Answer()
                how |= {"model": model, "text": turn.text, "pictures": turn.pictures}
                try:
                    answers[model] = Answer(**worker.call("answer", report=functools.partial(_grow, answers, model), **how))
                except FinetuneError as failure:
                    error = " ".join([*failure.problems, failure.fix])
                    so_far = answers.pop(model)
                    if so_far != Answer():
                        answers[model] = replace(so_far, tokens=0, stopped=True)
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
        return self._folder / PICTURES

    def is_running(self, run: RunDirectory) -> bool:
        return self._name == run.path.name and self._worker is not None and self._worker.is_alive

    def close(self) -> None:
        with self._lock:
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    def _worker_of(self, run: RunDirectory) -> Worker:
        if self._worker is None or self._name != run.path.name:
            if self._worker is not None:
                self._worker.close()
            arguments, log = (str(run.path), str(self.path(run))), self._folder / "log.txt"
            self._worker = Worker(self._workspace, ".chats", *arguments, log=log, tries=1)
            self._name = run.path.name
        return self._worker


def _grow(answers: dict[Model, Answer], model: Model, piece: tuple[str, bool]) -> None:
    text, is_thought = piece
    name = "thought" if is_thought else "text"
    answers[model] = replace(answers[model], **{name: getattr(answers[model], name) + text})


def keep_picture(folder: Path, upload: str) -> str:
    """Move an upload into a folder; return its name. Raises BadPicture or PackagesError."""
    name = picture_file(Path(upload)).digest
    folder.mkdir(exist_ok=True)
    shutil.move(upload, folder / name)
    return name


def kept_pictures(folder: Path, names: Iterable[str]) -> list[PictureSource]:
    """Return the intact images of these names."""
    pictures = [_kept(folder / name) for name in names if _PICTURE.fullmatch(name)]
    return [picture for picture in pictures if picture is not None]


@functools.lru_cache(maxsize=256)
def _kept(path: Path) -> PictureSource | None:
    try:
        picture = picture_file(path)
    except (BadPicture, PackagesError):
        return None
    # the name is the stored image's digest: drop a file that was changed before its first read
    return picture if picture.digest == path.name else None


class Conversation:
    """A conversation, continued from its file."""

    def __init__(self, run: RunDirectory, path: Path) -> None:
        self._run, self._path, self._folder = run, path, path.with_name(PICTURES)

    @functools.cached_property
    def _answerer(self) -> Answerer:
        from finetune.evaluate.answerer import Answerer

        return Answerer(self._run)

    def answer(
        self, work: Work, model: Model, text: str, pictures: Sequence[str], *, max_new_tokens: int, system: str = "",
        temperature: float = 0.0, top_p: float = 1.0, seed: int = 0,
    ) -> dict[str, Any]:  # fmt: skip
        """Send pieces of the reply to `work` as (text, is a thought); return the fields of an `Answer`."""
        from finetune.model.generate import Sampling

        added = kept_pictures(self._folder, pictures)
        if len(added) < len(pictures):
            raise CommandError("an image of this message was removed or changed", "Add it again.")
        earlier, images = self.history(model)
        messages = [*earlier, message_with_pictures(text, len(added))]
        system_messages = [{"role": "system", "content": system}] if system else []
        if images := [*images, *added]:
            self._answerer.require_vision()
        with self._answerer.using(model):
            reply, answer = self._answerer.stream(
                [*system_messages, *messages], lambda *piece: work.send(piece), tools=(), pictures=images,
                max_new_tokens=max_new_tokens, stopped=work.is_cancelled, sampling=Sampling(temperature, top_p, seed),
            )  # fmt: skip
        return {
            "text": answer.text, "tokens": reply.tokens, "tokens_per_s": reply.tokens_per_s, "stopped": reply.stopped,
            "calls": answer.calls, "thought": answer.thought,
        }  # fmt: skip

    def history(self, model: Model) -> tuple[list[dict[str, Any]], list[PictureSource]]:
        """Return the earlier messages with the model's own answers, and their images."""
        messages: list[dict[str, Any]] = []
        shown: list[PictureSource] = []
        for turn in _read_turns(self._path):
            if answer := turn.answers.get(model):
                pictures = kept_pictures(self._folder, turn.pictures)
                messages += [message_with_pictures(turn.text, len(pictures)), assistant_message(answer)]
                shown += pictures
        return messages, shown


def main() -> None:
    """Answer questions until idle; the memory is then free for training."""
    serve(Conversation(RunDirectory(Path(sys.argv[1])), Path(sys.argv[2])), _IDLE_S)


if __name__ == "__main__":
    main()
