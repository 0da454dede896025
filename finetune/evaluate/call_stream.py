"""An answer in pieces: its text as it arrives, its calls of tools when they are complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from finetune.data.answer_reader import AnswerReader
from finetune.data.call_syntax import Answer

if TYPE_CHECKING:
    from finetune.evaluate.answerer import Answerer
    from finetune.model.generate import Streamed


def stream_answer(
    answerer: Answerer, turns: list[dict[str, Any]], say: Callable[[str], None], *, reader: AnswerReader | None,
    tools: tuple[dict[str, Any], ...] = (), **options: Any,
) -> tuple[Streamed, Answer]:  # fmt: skip
    """The answer to `turns`, whose text is passed to `say` as it arrives; with a reader, also its calls of tools.

    `options`: of `Answerer.stream`.
    """
    prompt_ids = answerer.prompt_ids(turns, tools, options.get("pictures", ()))
    if reader is None:
        reply = answerer.stream(prompt_ids, say=say, **options)
        return reply, Answer(reply.text)
    call_stream = CallStream(reader, tools, say)
    return answerer.stream(prompt_ids, say=call_stream.add, with_calls=True, **options), call_stream.finish()


class CallStream:
    """Passes on the text before a call, and delays what may be the beginning of one."""

    def __init__(self, reader: AnswerReader, tools: Sequence[dict[str, Any]], on_text: Callable[[str], None]) -> None:
        self._reader, self._tools, self._on_text = reader, tools, on_text
        self._pieces = self._pending = self._emitted = ""
        self._is_delaying = False

    def add(self, piece: str) -> None:
        """The next piece, with its special tokens."""
        self._pieces += piece
        self._pending += piece
        if self._is_delaying:
            return
        openings = self._reader.openings
        positions = [position for opening in openings if (position := self._find(opening)) >= 0]
        self._is_delaying = bool(positions)
        self._emit(min(positions, default=len(self._pending) - longest_partial_match(openings, self._pending)))

    def finish(self) -> Answer:
        """There are no more pieces: the whole answer. Text that was delayed and is no call is passed on."""
        answer = self._reader.read(self._pieces, self._tools)
        if not answer.calls:
            self._emit(len(self._pending))
        elif text_after := answer.text.removeprefix(self._emitted.strip()).strip():
            self._on_text(f"\n{text_after}" if self._emitted else text_after)
        return answer

    def _find(self, opening: str) -> int:
        """Where a call may begin; bare JSON only at the beginning of the answer."""
        position = self._pending.find(opening)
        if opening == "{" and position >= 0 and (self._emitted + self._pending[:position]).strip():
            return -1
        return position

    def _emit(self, length: int) -> None:
        text, self._pending = self._reader.without_special_tokens(self._pending[:length]), self._pending[length:]
        if text:
            self._emitted += text
            self._on_text(text)


def longest_partial_match(marks: Iterable[str], text: str) -> int:
    """How many characters at the end of the text are the start of one of `marks`, but not all of it."""
    return max((size for mark in marks for size in range(1, len(mark)) if text.endswith(mark[:size])), default=0)
