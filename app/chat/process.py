"""Answers with base and tuned model side by side: `python -m app.chat.process RUN FILE`, questions as JSON on standard input.

Ends when the app ends, or after IDLE_S without a question, so that its memory is free for training.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from finetune.errors import FinetuneError
from finetune.events import EventWriter, read_events
from finetune.gc_settings import raise_gc_thresholds
from finetune.privacy import keep_private
from finetune.run.directory import RunDirectory

from ..process import redirect_stdout
from .chats import IDLE_S
from .events import KINDS, MODELS, Answer, Done, Failure, Model, Piece, Question

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
        identity = uuid.uuid4().hex
        models = tuple(model for model in MODELS if model in message.get("models", MODELS))
        writer.emit(Question(id=identity, text=message["question"], models=models))
        try:
            chat.answer(message, writer, identity, requests.is_stopped)
            writer.emit(Done(id=identity))
        except FinetuneError as error:
            writer.emit(Failure(id=identity, text=" ".join([*error.problems, error.fix])))
        except Exception as error:  # noqa: BLE001 - the page must say why there is no answer
            import traceback

            traceback.print_exc()
            writer.emit(Failure(id=identity, text=f"{type(error).__name__}: {error}"))
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
    """One message history for each model, with that model's own answers."""

    def __init__(self, run: RunDirectory, path: Path) -> None:
        self._run, self._answerer = run, None
        self._messages: dict[str, list[dict[str, Any]]] = {model: [] for model in MODELS}
        self._restore(path)

    def answer(self, request: dict[str, Any], writer: EventWriter, identity: str, stopped: Callable[[], bool]) -> None:
        """The answers, written as they are made, each from the same seed."""
        from finetune.model.generate import Sampling

        if self._answerer is None:
            from finetune.evaluate.answerer import Answerer

            self._answerer = Answerer(self._run)  # type: ignore[assignment]
        answerer: Any = self._answerer
        sampling = Sampling(float(request.get("temperature", 0)), float(request.get("top_p", 1)), int(request.get("seed", 0)))
        system = [{"role": "system", "content": request["system"]}] if request.get("system") else []
        for model in (model for model in MODELS if model in request.get("models", MODELS)):
            messages = [*self._messages[model], {"role": "user", "content": request["question"]}]
            pieces = _Pieces(writer, identity, model)
            with answerer.using(model):
                reply = answerer.stream(
                    answerer.prompt_ids([*system, *messages]), max_new_tokens=int(request["max_new_tokens"]),
                    sampling=sampling, say=pieces.add, stopped=stopped,
                )  # fmt: skip
            self._messages[model] = [*messages, {"role": "assistant", "content": reply.text}]
            writer.emit(
                Answer(
                    id=identity,
                    model=model,
                    text=reply.text,
                    tokens=reply.tokens,
                    tokens_per_s=reply.tokens_per_s,
                    stopped=reply.stopped,
                )  # fmt: skip
            )

    def _restore(self, path: Path) -> None:
        """Restore the conversation that the page shows."""
        events = read_events(path, KINDS)
        questions = {event.id: event.text for event in events if isinstance(event, Question)}
        for event in events:
            if isinstance(event, Answer) and event.id in questions:
                pair = [{"role": "user", "content": questions[event.id]}, {"role": "assistant", "content": event.text}]
                self._messages[event.model] += pair


class _Pieces:
    """Writes an answer's pieces, a few times a second."""

    def __init__(self, writer: EventWriter, identity: str, model: Model) -> None:
        self._writer, self._identity, self._model = writer, identity, model
        self._waiting, self._written = "", time.monotonic()

    def add(self, text: str) -> None:
        """Write the text with the pieces that wait, unless something was written just now."""
        self._waiting += text
        now = time.monotonic()
        if now - self._written >= _PIECE_S:
            self._writer.emit(Piece(id=self._identity, model=self._model, text=self._waiting))
            self._waiting, self._written = "", now


if __name__ == "__main__":
    sys.exit(main())
