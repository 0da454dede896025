"""Stream an answer: thought and text as they arrive, tool calls when they are complete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from finetune.data.chat_format import ChatFormat
from finetune.data.tool_calls import Answer

if TYPE_CHECKING:
    from finetune.evaluate.answerer import Answerer
    from finetune.model.generate import Streamed

#: Takes a piece of an answer, and whether it is part of the thought.
OnPiece = Callable[[str, bool], None]


def stream_answer(
    answerer: Answerer, turns: list[dict[str, Any]], say: OnPiece, *, tools: tuple[dict[str, Any], ...] | None = None,
    **options: Any,
) -> tuple[Streamed, Answer]:  # fmt: skip
    """Answer `turns`, passing pieces to `say`; with `tools=None` calls stay text."""
    prompt_ids = answerer.prompt_ids(turns, tools or (), options.get("pictures", ()))
    if answerer.chat_format is None:
        reply = answerer.stream(prompt_ids, say=lambda piece: say(piece, False), **options)
        return reply, Answer(reply.text)
    stream = AnswerStream(answerer.chat_format, tools, say)
    reply = answerer.stream(prompt_ids, say=stream.add, **options)
    return reply, stream.finish(is_cut=not reply.ended)


class AnswerStream:
    """Passes on thought and text, and delays the possible beginning of a mark or call."""

    def __init__(self, chat_format: ChatFormat, tools: Sequence[dict[str, Any]] | None, say: OnPiece) -> None:
        self._format, self._tools, self._say = chat_format, tools, say
        self._openings = chat_format.call_openings if tools is not None else ()
        self._pieces, self._emitted = "", ["", ""]  # of the text, and of the thought

    def add(self, piece: str) -> None:
        """Take the next piece, with its special tokens."""
        self._pieces += piece
        marks = (*self._openings, *self._format.literals)
        whole = self._pieces[: len(self._pieces) - longest_partial_match(marks, self._pieces)]
        thought, text = self._format.split(whole.rstrip(), is_cut=True)
        positions = [position for opening in self._openings if (position := _find(text, opening)) >= 0]
        text = text[: min(positions, default=None)]
        self._pass_on(*map(self._format.without_special_tokens, (text, thought)))

    def finish(self, *, is_cut: bool = False) -> Answer:
        """Return the whole answer, after passing on delayed text that is no call."""
        answer = self._format.read(self._pieces, self._tools, is_cut=is_cut)
        text, emitted = answer.text, self._emitted[0].strip()
        if answer.calls and emitted and text.startswith(emitted) and text != emitted:
            self._say(f"\n{text.removeprefix(emitted).strip()}", False)
        else:
            self._pass_on(text, answer.thought)
        return answer

    def _pass_on(self, text: str, thought: str) -> None:
        for is_thought, part in ((True, thought), (False, text)):
            emitted = self._emitted[is_thought]
            if part.startswith(emitted) and part != emitted:
                self._say(part[len(emitted) :], is_thought)
                self._emitted[is_thought] = part


def _find(text: str, opening: str) -> int:
    position = text.find(opening)
    # bare JSON is a call only at the beginning of the answer
    return -1 if opening == "{" and text[:position].strip() else position


def longest_partial_match(marks: tuple[str, ...], text: str) -> int:
    """Return the length of the text's end that begins a mark without completing any."""
    if text.endswith(marks):
        return 0
    return max((size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])), default=0)
