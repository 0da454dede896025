"""Answers of a run's models: `python -m app.chat.process RUN FILE`, questions as JSON on standard input.

Ends when the app ends, or after IDLE_S without a question, so that its memory is free for training.
"""

from __future__ import annotations

import functools
import json
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.call_syntax import assistant_message
from finetune.data.pictures.placement import message_with_pictures
from finetune.data.pictures.source import PictureSource
from finetune.errors import CommandError, FinetuneError
from finetune.events import EventWriter, read_events
from finetune.gc_settings import raise_gc_thresholds
from finetune.privacy import keep_private
from finetune.run.directory import RunDirectory

from ..process import redirect_stdout
from .chats import IDLE_S, KINDS, MODELS, PICTURES, Answer, Done, Model, Piece, Question
from .pictures import kept_pictures

if TYPE_CHECKING:
    from finetune.evaluate.answerer import Answerer

#: Seconds between two pieces of an answer in the file.
_PIECE_S = 0.2


def main() -> int:
    """Load the model at the first question, answer until idle."""
    run, path = RunDirectory(Path(sys.argv[1])), Path(sys.argv[2])
    keep_private()
    raise_gc_thresholds()
    redirect_stdout()
    writer, chat, requests = EventWriter(path), Conversation(run, path), RequestReader()
    while message := requests.next():
        question = Question(
            id=uuid.uuid4().hex, text=message["question"], models=tuple(message.get("models", MODELS)),
            pictures=tuple(message.get("pictures", ())),
        )  # fmt: skip
        writer.emit(question)
        error = ""
        try:
            chat.answer(message, question, writer, requests.is_stopped)
        except FinetuneError as failure:
            error = " ".join([*failure.problems, failure.fix])
        except Exception as failure:  # noqa: BLE001 - the page must say why there is no answer
            import traceback

            traceback.print_exc()
            error = f"{type(failure).__name__}: {failure}"
        writer.emit(Done(id=question.id, error=error))
    return 0


class RequestReader:
    """Questions from standard input, read by a thread, so that a stop arrives while an answer is made."""

    def __init__(self) -> None:
        self._questions: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._stop = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def next(self) -> dict[str, Any] | None:
        """The next question; None at the end of the app, or after IDLE_S without one."""
        try:
            message = self._questions.get(timeout=IDLE_S)
        except queue.Empty:
            return None
        if message is not None:
            self._stop.clear()
        return message

    def is_stopped(self) -> bool:
        """Whether the answers to the present question shall end."""
        return self._stop.is_set()

    def _read(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            if message.get("stop"):
                self._stop.set()
            else:
                self._questions.put(message)
        self._stop.set()
        self._questions.put(None)


class Conversation:
    """One history of messages for each of the run's models, with that model's own answers."""

    def __init__(self, run: RunDirectory, path: Path) -> None:
        self._run, self._folder = run, path.with_name(PICTURES)
        self._messages: dict[Model, list[dict[str, Any]]] = {model: [] for model in MODELS}
        self._pictures: dict[Model, list[PictureSource]] = {model: [] for model in MODELS}
        self._restore(path)

    @functools.cached_property
    def _answerer(self) -> Answerer:
        from finetune.evaluate.answerer import Answerer

        return Answerer(self._run)

    def answer(self, request: dict[str, Any], question: Question, writer: EventWriter, stopped: Callable[[], bool]) -> None:
        """Stream the models' answers, each from the same seed, until the user stops."""
        for model in question.models:
            if not stopped():
                writer.emit(self._answer(model, request, question, _Pieces(writer, question.id, model), stopped))

    def _answer(
        self, model: Model, request: dict[str, Any], question: Question, pieces: _Pieces, stopped: Callable[[], bool]
    ) -> Answer:
        from finetune.evaluate.answer_stream import stream_answer
        from finetune.model.generate import Sampling

        added = kept_pictures(self._folder, question.pictures)
        if len(added) < len(question.pictures):
            raise CommandError("a picture of this message is gone or was changed", "Add it again.")
        messages = [*self._messages[model], message_with_pictures(question.text, len(added))]
        system = [{"role": "system", "content": request["system"]}] if request.get("system") else []
        if pictures := [*self._pictures[model], *added]:
            self._answerer.require_vision()
        with self._answerer.using(model):
            reply, answer = stream_answer(
                self._answerer, [*system, *messages], pieces.add, tools=(), pictures=pictures,
                max_new_tokens=int(request["max_new_tokens"]), stopped=stopped,
                sampling=Sampling(request.get("temperature", 0.0), request.get("top_p", 1.0), request.get("seed", 0)),
            )  # fmt: skip
        self._messages[model], self._pictures[model] = [*messages, assistant_message(answer)], pictures
        return Answer(
            id=question.id, model=model, text=answer.text, tokens=reply.tokens, tokens_per_s=reply.tokens_per_s,
            stopped=reply.stopped, calls=tuple(answer.calls), thought=answer.thought,
        )  # fmt: skip

    def _restore(self, path: Path) -> None:
        events = read_events(path, KINDS)
        questions = {event.id: event for event in events if isinstance(event, Question)}
        for event in events:
            if isinstance(event, Answer) and event.id in questions:
                question = questions[event.id]
                pictures = kept_pictures(self._folder, question.pictures)
                self._messages[event.model] += [
                    message_with_pictures(question.text, len(pictures)), assistant_message(event),
                ]  # fmt: skip
                self._pictures[event.model] += pictures


class _Pieces:
    """Writes an answer's pieces, a few times a second."""

    def __init__(self, writer: EventWriter, identity: str, model: Model) -> None:
        self._writer, self._identity, self._model = writer, identity, model
        self._waiting, self._written = ["", ""], time.monotonic()  # the answer's text, and its thought's

    def add(self, text: str, is_thought: bool) -> None:
        """Write the text with the pieces that wait, unless something was written just now."""
        self._waiting[is_thought] += text
        now = time.monotonic()
        if now - self._written >= _PIECE_S:
            answer, thought = self._waiting
            self._writer.emit(Piece(id=self._identity, model=self._model, text=answer, thought=thought))
            self._waiting, self._written = ["", ""], now


if __name__ == "__main__":
    sys.exit(main())
