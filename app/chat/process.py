"""Answers with base and tuned model side by side: `python -m app.chat.process RUN FILE`, questions as JSON on standard input.

Ends when the app ends, or after IDLE_S without a question, so that its memory is free for training.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

from app.chat.chats import IDLE_S
from app.chat.said import KINDS, MODELS, Answer, Done, Failure, Question
from app.process import claim_stdout
from finetune.errors import FinetuneError
from finetune.events import EventWriter, read_events
from finetune.garbage import collect_rarely
from finetune.run.directory import RunDirectory


def main() -> int:
    """Load the model at the first question, answer until idle."""
    run, path = RunDirectory(Path(sys.argv[1])), Path(sys.argv[2])
    collect_rarely()
    claim_stdout()
    writer, chat = EventWriter(path), Conversation(run, path)
    while line := _next_line():
        asked = json.loads(line)
        identity = uuid.uuid4().hex
        writer.emit(Question(id=identity, text=asked["question"]))
        try:
            chat.answer(asked["question"], int(asked["max_new_tokens"]), writer, identity)
            writer.emit(Done(id=identity))
        except FinetuneError as error:
            writer.emit(Failure(id=identity, text=" ".join([*error.problems, error.fix])))
        except Exception as error:  # noqa: BLE001 - the page must say why there is no answer
            import traceback

            traceback.print_exc()
            writer.emit(Failure(id=identity, text=f"{type(error).__name__}: {error}"))
    return 0


def _next_line() -> str:
    """The next question, empty at the end of the app; ends the process after IDLE_S without one."""
    idle = threading.Timer(IDLE_S, os._exit, [0])
    idle.daemon = True
    idle.start()
    try:
        return sys.stdin.readline()
    finally:
        idle.cancel()


class Conversation:
    """One message history for each model, with that model's own answers."""

    def __init__(self, run: RunDirectory, path: Path) -> None:
        self._run, self._answerer = run, None
        self._messages: dict[str, list[dict[str, Any]]] = {model: [] for model in MODELS}
        self._restore(path)

    def answer(self, question: str, most_tokens: int, writer: EventWriter, identity: str) -> None:
        """Both answers, written when each is whole."""
        if self._answerer is None:
            from finetune.evaluate.answerer import Answerer

            self._answerer = Answerer(self._run)  # type: ignore[assignment]
        answerer: Any = self._answerer
        for model in MODELS:
            messages = [*self._messages[model], {"role": "user", "content": question}]
            with answerer.as_base() if model == "base" else contextlib.nullcontext():
                text = answerer.answer([answerer.prompt_ids(messages)], max_new_tokens=most_tokens)[0]
            self._messages[model] = [*messages, {"role": "assistant", "content": text}]
            writer.emit(Answer(id=identity, model=model, text=text))

    def _restore(self, path: Path) -> None:
        """Go on with the conversation that the page shows."""
        events = read_events(path, KINDS)
        questions = {event.id: event.text for event in events if isinstance(event, Question)}
        for event in events:
            if isinstance(event, Answer) and event.id in questions:
                pair = [{"role": "user", "content": questions[event.id]}, {"role": "assistant", "content": event.text}]
                self._messages[event.model] += pair


if __name__ == "__main__":
    sys.exit(main())
