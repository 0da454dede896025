"""Chat process, a worker: `python -m app.chat.process RUN FILE`"""

from __future__ import annotations

import functools
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.pictures.placement import message_with_pictures
from finetune.data.pictures.source import PictureSource
from finetune.data.tool_calls import assistant_message
from finetune.errors import CommandError
from finetune.events import EventWriter, read_events
from finetune.run.directory import RunDirectory
from finetune.serialise import from_json

from ..worker import Work, serve
from .chats import IDLE_S, KINDS, MODELS, PICTURES, Answer, Model, Piece, Question, kept_pictures

if TYPE_CHECKING:
    from finetune.evaluate.answerer import Answerer

#: Seconds between two pieces of an answer.
_PIECE_S = 0.2


class Conversation:
    """Messages of each of the run's models."""

    def __init__(self, run: RunDirectory, path: Path) -> None:
        self._run, self._path, self._folder = run, path, path.with_name(PICTURES)
        # per model: each history has the model's own answers
        self._messages: dict[Model, list[dict[str, Any]]] = {model: [] for model in MODELS}
        self._pictures: dict[Model, list[PictureSource]] = {model: [] for model in MODELS}
        self._restore(path)

    @functools.cached_property
    def _answerer(self) -> Answerer:
        from finetune.evaluate.answerer import Answerer

        return Answerer(self._run)

    def answer(self, work: Work, question: dict[str, Any], **options: Any) -> None:
        asked, writer = from_json(Question, question), EventWriter(self._path)
        for model in asked.models:
            if not work.is_cancelled():
                writer.emit(self._answer(model, asked, _Pieces(writer, asked.id, model), work, **options))

    def _answer(
        self, model: Model, question: Question, pieces: _Pieces, work: Work, *, max_new_tokens: int, system: str = "",
        temperature: float = 0.0, top_p: float = 1.0, seed: int = 0,
    ) -> Answer:  # fmt: skip
        from finetune.evaluate.answer_stream import stream_answer
        from finetune.model.generate import Sampling

        added = kept_pictures(self._folder, question.pictures)
        if len(added) < len(question.pictures):
            raise CommandError("an image of this message was removed or changed", "Add it again.")
        messages = [*self._messages[model], message_with_pictures(question.text, len(added))]
        before = [{"role": "system", "content": system}] if system else []
        if shown := [*self._pictures[model], *added]:
            self._answerer.require_vision()
        with self._answerer.using(model):
            reply, answer = stream_answer(
                self._answerer, [*before, *messages], pieces.add, tools=(), pictures=shown, max_new_tokens=max_new_tokens,
                stopped=work.is_cancelled, sampling=Sampling(temperature, top_p, seed),
            )  # fmt: skip
        self._messages[model], self._pictures[model] = [*messages, assistant_message(answer)], shown
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
    def __init__(self, writer: EventWriter, identity: str, model: Model) -> None:
        self._writer, self._identity, self._model = writer, identity, model
        self._waiting, self._written = ["", ""], time.monotonic()  # text of the answer, text of the thought

    def add(self, text: str, is_thought: bool) -> None:
        self._waiting[is_thought] += text
        now = time.monotonic()
        # a line per token would fill the file, and every tab reads the file again and again
        if now - self._written >= _PIECE_S:
            answer, thought = self._waiting
            self._writer.emit(Piece(id=self._identity, model=self._model, text=answer, thought=thought))
            self._waiting, self._written = ["", ""], now


def main() -> int:
    """Answer questions until idle."""
    # ends when idle: the memory is free for training
    serve(Conversation(RunDirectory(Path(sys.argv[1])), Path(sys.argv[2])), IDLE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
