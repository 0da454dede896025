"""One answer at a time: requests wait in order, a client that disconnects ends its answer, a full queue refuses others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from finetune.data.pictures.source import PictureSource, checked_picture
from finetune.errors import CommandError, DataError, PackagesError
from finetune.evaluate.call_stream import CallStream, longest_partial_match
from finetune.serve.requests import ChatRequest, RequestError

if TYPE_CHECKING:
    from finetune.data.tool_calls import Call
    from finetune.model.generate import Streamed
    from finetune.serve.models import Models

#: No vocabulary has a token of more characters: the longest of Llama 3 and Qwen are 128 spaces.
MAX_TOKEN_CHARACTERS = 256
#: Longer prompts are tokenised in a thread of their own: others don't wait for them.
_LONG_CHARACTERS = 10_000
_NOTICED_WITHIN_S = 0.5


@dataclass(frozen=True)
class AnswerEnd:
    """The end of an answer, for OpenAI's `finish_reason` and `usage`."""

    reason: Literal["stop", "length", "tool_calls"]
    prompt_tokens: int
    tokens: int


@dataclass(frozen=True)
class _Prompt:
    """Tokens of a prompt, the beginning of the answer that they have, what constrains the answer, and the pictures."""

    ids: list[int]
    start: str = ""
    constraint: Any = None
    pictures: tuple[PictureSource, ...] = ()


#: What an answer consists of: pieces of text, the list of its calls, and its end.
AnswerPart = str | list["Call"] | AnswerEnd


class Engine:
    """Answers of the loaded models.

    `tokens`: limit of a prompt with its answer. `max_waiting`: limit of requests that wait behind the one being answered.
    `unreadable_calls`: answers that began a call of a tool which could not be read, and stayed text.
    """

    def __init__(self, models: Models, tokens: int, max_waiting: int = 32) -> None:
        self.models, self._tokens, self._max_waiting = models, tokens, max_waiting
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answers")
        self._tokeniser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")
        self._long_tokeniser = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long prompts")
        self._open_requests: set[threading.Event] = set()
        self._tokenising = self._delayed = self.unreadable_calls = 0

    @property
    def max_characters(self) -> int:
        """No messages with more have few enough tokens."""
        return self._tokens * MAX_TOKEN_CHARACTERS

    async def answer(self, request: ChatRequest) -> AsyncIterator[AnswerPart]:
        """Check a request and queue it; yields the pieces of the answer, the list of its calls if it has some, then its end.

        Closing the iterator ends the answer. Raises RequestError for what can't be answered, before anything is yielded.
        """
        if request.model not in self.models.names:
            message = f"There is no model {request.model[:100]!r} here, only {', '.join(self.models.names)}."
            raise RequestError(message, status=404, param="model", code="model_not_found")
        await self._require_few_waiting()
        if (characters := request.characters) > self.max_characters:
            message = f"This server has a limit of {self._tokens} tokens; the messages have {characters:,} characters."
            raise RequestError(message, param="messages", code="context_length_exceeded")
        self._tokenising += 1
        is_long = characters > _LONG_CHARACTERS or request.has_pictures
        pool = self._long_tokeniser if is_long else self._tokeniser
        try:  # in a thread: the event loop serves the other clients meanwhile
            prompt = await asyncio.get_running_loop().run_in_executor(pool, self._prompt, request)
        finally:
            self._tokenising -= 1
        remaining = self._tokens - len(prompt.ids)
        if remaining < 1 or (request.max_new_tokens or 1) > remaining:
            raise RequestError(
                f"This server has a limit of {self._tokens} tokens; the messages have {len(prompt.ids)} and "
                f"{request.max_new_tokens or 1} were requested.",
                param="messages", code="context_length_exceeded",
            )  # fmt: skip
        return self._pieces(request, prompt, request.max_new_tokens or remaining)

    async def _require_few_waiting(self) -> None:
        """Raise RequestError when too many wait, also after the moment in which clients that have left are noticed; at once
        when as many are delayed by that moment already."""
        loop = asyncio.get_running_loop()
        end = loop.time() + (_NOTICED_WITHIN_S if self._delayed < self._max_waiting else 0)
        self._delayed += 1
        try:
            while (waiting := len(self._open_requests) + self._tokenising) > self._max_waiting:
                if loop.time() >= end:
                    raise RequestError(f"{waiting + self._delayed - 1} requests are waiting already. Try again later.",
                                       status=429, code="rate_limit_exceeded")  # fmt: skip
                await asyncio.sleep(_NOTICED_WITHIN_S / 10)
        finally:
            self._delayed -= 1

    def close(self) -> None:
        """End the current answer, and cancel the waiting requests."""
        for cancelled in list(self._open_requests):
            cancelled.set()
        for pool in (self._worker, self._tokeniser, self._long_tokeniser):
            pool.shutdown(wait=True, cancel_futures=True)

    def _prompt(self, request: ChatRequest) -> _Prompt:
        try:
            if request.has_calls and self.models.reader(request.model) is None:  # most templates leave them out without a word
                message = f"The chat template of {request.model} writes no calls of tools."
                param = "tools" if request.offered_tools else "messages"
                raise RequestError(message, param=param, code="unsupported_parameter")
            if (schema := request.schema_of_answer) is not None:
                ids, constraint = self.models.constrained_prompt(request.model, request.conversation, schema)
                return _Prompt(ids, constraint=constraint)
            if request.has_pictures:
                return self._picture_prompt(request)
            if not request.offered_tools:
                return _Prompt(self.models.prompt_ids(request.model, request.conversation))
            return _Prompt(
                *self.models.prompt_with_tools(request.model, request.conversation, request.offered_tools, request.forced_tool)
            )
        except CommandError as error:
            raise RequestError(f"{error.problems[0]}.", param="response_format", code="unsupported_parameter") from None
        except DataError as error:
            param = "messages" if request.schema_of_answer is None else "response_format"
            raise RequestError(" ".join(error.problems), param=param, code="invalid_value") from None
        except PackagesError as error:
            raise RequestError(f"{error.problems[0]}.", status=500, code="internal_error") from None

    def _picture_prompt(self, request: ChatRequest) -> _Prompt:
        """The prompt of a request with pictures, each of which is decoded once here. Raises RequestError."""
        if not self.models.reads_pictures(request.model):
            raise RequestError(f"{request.model} was trained on text; it reads no pictures.", param="messages",
                               code="unsupported_parameter")  # fmt: skip
        try:
            pictures = tuple(checked_picture(reference) for reference in request.pictures)
        except ValueError as error:
            raise RequestError(f"{error}.", param="messages", code="invalid_value") from None
        ids = self.models.prompt_ids(request.model, request.conversation, request.offered_tools, pictures)
        return _Prompt(ids, pictures=pictures)

    def _call_stream(self, request: ChatRequest, start: str, send: Callable[[str], None]) -> CallStream | None:
        """Reads the calls of an answer to a request with tools."""
        reader = self.models.reader(request.model) if request.offered_tools else None
        if reader is None:
            return None
        return CallStream(reader, request.offered_tools, send, start=start, limit=None if request.parallel_tool_calls else 1)

    async def _pieces(self, request: ChatRequest, prompt: _Prompt, max_new_tokens: int) -> AsyncIterator[AnswerPart]:
        loop, pieces, cancelled = asyncio.get_running_loop(), asyncio.Queue[AnswerPart | Exception](), threading.Event()

        def send(value: AnswerPart | Exception) -> None:
            if not cancelled.is_set():
                loop.call_soon_threadsafe(pieces.put_nowait, value)

        def answer() -> None:
            if cancelled.is_set():
                return
            call_stream = self._call_stream(request, prompt.start, send)
            stop_filter = StopFilter(request.stops, call_stream.add if call_stream else send)
            more: dict[str, Any] = {"with_calls": True} if call_stream else {}
            more |= {"constraint": prompt.constraint} if prompt.constraint else {}
            more |= {"pictures": prompt.pictures} if prompt.pictures else {}
            try:
                streamed = self.models.stream(
                    request.model, prompt.ids, max_new_tokens=max_new_tokens, sampling=request.sampling, say=stop_filter.add,
                    stopped=lambda: stop_filter.is_stopped or cancelled.is_set(),
                    **more,
                )  # fmt: skip
                stop_filter.finish()
                reason = _reason(streamed, stop_filter.is_stopped, max_new_tokens)
                if call_stream:
                    whole = call_stream.finish()
                    self.unreadable_calls += whole.is_unreadable
                    if whole.calls:
                        reason = "tool_calls"
                        send(whole.calls)
                send(AnswerEnd(reason, len(prompt.ids), streamed.tokens))
            except DataError as error:  # a schema that is too complex to go on
                send(RequestError(error.problems[0], param="response_format", code="invalid_value"))
            except Exception as error:  # noqa: BLE001 - the client gets it
                send(error)

        self._open_requests.add(cancelled)
        try:
            self._worker.submit(answer)
            while True:
                value = await pieces.get()
                if isinstance(value, RequestError):
                    raise value
                if isinstance(value, Exception):
                    raise RequestError(f"{type(value).__name__}: {value}", status=500, code="internal_error") from value
                yield value
                if isinstance(value, AnswerEnd):
                    return
        finally:
            cancelled.set()
            self._open_requests.discard(cancelled)


def _reason(streamed: Streamed, stopped: bool, max_new_tokens: int) -> Literal["stop", "length", "tool_calls"]:
    return "length" if not streamed.ended and not stopped and streamed.tokens >= max_new_tokens else "stop"


class StopFilter:
    """Emits pieces of text up to one of `stops`, without it; delays text that may be the start of one."""

    def __init__(self, stops: list[str], on_text: Callable[[str], None]) -> None:
        self._stops, self._on_text, self._pending = stops, on_text, ""
        self.is_stopped = False

    def add(self, piece: str) -> None:
        if self.is_stopped:
            return
        self._pending += piece
        positions = [position for stop in self._stops if (position := self._pending.find(stop)) >= 0]
        if positions:
            self.is_stopped = True
            self._emit(min(positions))
            return
        self._emit(len(self._pending) - longest_partial_match(self._stops, self._pending))

    def finish(self) -> None:
        """There are no more pieces: emit the delayed text."""
        if not self.is_stopped:
            self._emit(len(self._pending))

    def _emit(self, length: int) -> None:
        if length > 0:
            self._on_text(self._pending[:length])
        self._pending = self._pending[max(0, length) :]
