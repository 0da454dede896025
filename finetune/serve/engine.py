"""One answer at a time: requests wait in order, a client that leaves ends its answer, and too many waiting are refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from finetune.errors import DataError
from finetune.serve.requests import Asked, RequestError

if TYPE_CHECKING:
    from finetune.model.generate import Streamed
    from finetune.serve.models import Models


@dataclass(frozen=True)
class Ended:
    """The end of an answer, as OpenAI's `finish_reason` and `usage` have it."""

    reason: Literal["stop", "length"]
    prompt_tokens: int
    tokens: int


class Engine:
    """Answers of the loaded models.

    `tokens`: most of a prompt with its answer. `most_waiting`: requests that wait beside the one being answered.
    """

    def __init__(self, models: Models, tokens: int, most_waiting: int = 32) -> None:
        self.models, self._tokens, self._most_waiting = models, tokens, most_waiting
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answers")
        self._asked: set[threading.Event] = set()

    async def begin(self, asked: Asked) -> AsyncIterator[str | Ended]:
        """Check a request and put it in the queue; yields the pieces of the answer, then its end.

        Closing the iterator ends the answer. Raises RequestError for what can't be answered, before anything is yielded.
        """
        if asked.model not in self.models.names:
            known = ", ".join(self.models.names)
            raise RequestError(f"There is no model {asked.model[:100]!r} here, only {known}.", status=404, param="model",
                               code="model_not_found")  # fmt: skip
        if len(self._asked) > self._most_waiting:
            raise RequestError(f"{len(self._asked)} requests are waiting already. Try again later.", status=429,
                               code="rate_limit_exceeded")  # fmt: skip
        prompt = self._prompt(asked)
        left = self._tokens - len(prompt)
        if left < 1 or (asked.most_tokens or 1) > left:
            raise RequestError(
                f"This server has room for {self._tokens} tokens; {len(prompt)} are in the messages and "
                f"{asked.most_tokens or 1} were asked for.",
                param="messages", code="context_length_exceeded",
            )  # fmt: skip
        return self._pieces(asked, prompt, asked.most_tokens or left)

    def close(self) -> None:
        """End the answer that is being made, and those that wait."""
        for stop in list(self._asked):
            stop.set()
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _prompt(self, asked: Asked) -> list[int]:
        try:
            return self.models.prompt_ids(asked.model, [message.as_trained() for message in asked.messages])
        except DataError as error:
            raise RequestError(" ".join(error.problems), param="messages", code="invalid_value") from None

    async def _pieces(self, asked: Asked, prompt: list[int], most: int) -> AsyncIterator[str | Ended]:
        loop, made, left = asyncio.get_running_loop(), asyncio.Queue[str | Ended | Exception](), threading.Event()

        def tell(value: str | Ended | Exception) -> None:
            if not left.is_set():
                loop.call_soon_threadsafe(made.put_nowait, value)

        def answer() -> None:
            if left.is_set():
                return
            until = UntilStop(asked.stops, tell)
            try:
                answered = self.models.stream(
                    asked.model, prompt, most_tokens=most, sampling=asked.sampling, say=until.add,
                    stopped=lambda: until.found or left.is_set(),
                )  # fmt: skip
                until.finish()
                tell(Ended(_reason(answered, until.found, most), len(prompt), answered.tokens))
            except Exception as error:  # noqa: BLE001 - the client must hear of it
                tell(error)

        self._asked.add(left)
        try:
            self._worker.submit(answer)
            while True:
                value = await made.get()
                if isinstance(value, Exception):
                    raise RequestError(f"{type(value).__name__}: {value}", status=500, code="internal_error") from value
                yield value
                if isinstance(value, Ended):
                    return
        finally:
            left.set()
            self._asked.discard(left)


def _reason(answered: Streamed, stopped: bool, most: int) -> Literal["stop", "length"]:
    return "length" if not answered.ended and not stopped and answered.tokens >= most else "stop"


class UntilStop:
    """Passes pieces of text on until one of `stops`, which is not passed on; holds back what may begin one."""

    def __init__(self, stops: list[str], say: Callable[[str], None]) -> None:
        self._stops, self._say, self._held = stops, say, ""
        self.found = False

    def add(self, piece: str) -> None:
        """The next piece."""
        if self.found:
            return
        self._held += piece
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.found = True
            self._pass_on(min(places))
            return
        self._pass_on(len(self._held) - max((_beginning_of(stop, self._held) for stop in self._stops), default=0))

    def finish(self) -> None:
        """There are no more pieces: what was held back began nothing."""
        if not self.found:
            self._pass_on(len(self._held))

    def _pass_on(self, length: int) -> None:
        if length > 0:
            self._say(self._held[:length])
        self._held = self._held[max(0, length) :]


def _beginning_of(stop: str, text: str) -> int:
    """How many characters at the end of the text are the beginning of `stop`."""
    return next((size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size])), 0)
