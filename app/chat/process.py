"""Chat process, a worker: `python -m app.chat.process RUN FILE`"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.pictures.placement import message_with_pictures
from finetune.data.pictures.source import PictureSource
from finetune.data.tool_calls import assistant_message
from finetune.errors import CommandError
from finetune.run.directory import RunDirectory

from ..worker import Work, serve
from .chats import IDLE_S, PICTURES, Model, kept_pictures, read_turns

if TYPE_CHECKING:
    from finetune.evaluate.answerer import Answerer


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
        """Return the fields of an `Answer`; reports pieces as text and whether the text is a thought."""
        from finetune.model.generate import Sampling

        added = kept_pictures(self._folder, pictures)
        if len(added) < len(pictures):
            raise CommandError("an image of this message was removed or changed", "Add it again.")
        earlier, shown = self.history(model)
        messages = [*earlier, message_with_pictures(text, len(added))]
        before = [{"role": "system", "content": system}] if system else []
        if shown := [*shown, *added]:
            self._answerer.require_vision()
        with self._answerer.using(model):
            reply, answer = self._answerer.stream(
                [*before, *messages], lambda *piece: work.send(piece), tools=(), pictures=shown,
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
        for turn in read_turns(self._path):
            if answer := turn.answers.get(model):
                pictures = kept_pictures(self._folder, turn.question.pictures)
                messages += [message_with_pictures(turn.question.text, len(pictures)), assistant_message(answer)]
                shown += pictures
        return messages, shown


def main() -> int:
    """Answer questions until idle."""
    # ends when idle: the memory is free for training
    serve(Conversation(RunDirectory(Path(sys.argv[1])), Path(sys.argv[2])), IDLE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
