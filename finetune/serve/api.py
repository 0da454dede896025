"""The HTTP interface: FastAPI's routes, OpenAI's own types for the answers, a token for every request."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import Any, Literal, TypeVar

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from openai.types import CompletionUsage, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from openai.types.chat.chat_completion_message_tool_call import ChatCompletionMessageToolCall, Function
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from finetune.data.tool_calls import Call
from finetune.files import parse_json
from finetune.serve.engine import AnswerEnd, AnswerPart, Engine
from finetune.serve.requests import ChatRequest, RequestError, read_request

_T = TypeVar("_T")
#: Characters of a call's arguments in one event.
_ARGUMENTS_PIECE = 64
_BODY_BYTES = 4 * 2**20
#: Of a model that reads pictures, whose bytes are in the body.
_PICTURE_BODY_BYTES = 24 * 2**20
_BYTES_A_CHARACTER = 4  # in UTF-8
#: Seconds in which a body has to arrive.
_BODY_S = 30.0
_SURROGATE = re.compile(rb"\\u[dD]")
_CLIENT_LEFT = RequestError("The client has left.", status=499)
_HEADERS = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "5"}}


def build(engine: Engine, token: str) -> FastAPI:
    """The application: `/v1/models`, `/v1/chat/completions`, and `/health`, which alone needs no token."""
    created = int(time.time())
    api = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)

    @api.exception_handler(RequestError)
    async def refuse(_: Request, error: RequestError) -> Response:
        return JSONResponse(error.as_json(), error.status, _HEADERS.get(error.status))

    @api.exception_handler(HTTPException)
    async def refuse_route(_: Request, error: HTTPException) -> Response:
        refusal = RequestError(f"{error.detail}.", status=error.status_code)
        return JSONResponse(refusal.as_json(), error.status_code, error.headers)

    async def check(request: Request) -> None:
        scheme, _, credentials = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(credentials.strip().encode(), token.encode()):
            raise RequestError("Incorrect API key: give the token that `finetune serve` printed.", status=401,
                               code="invalid_api_key")  # fmt: skip

    @api.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "unreadable_calls": engine.unreadable_calls}

    guarded = APIRouter(prefix="/v1", dependencies=[Depends(check)])

    @guarded.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(name, created) for name in engine.models.names]}

    @guarded.get("/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name not in engine.models.names:
            raise RequestError(f"There is no model {name[:100]!r}.", status=404, param="model", code="model_not_found")
        return _model(name, created)

    @guarded.post("/chat/completions")
    async def answer(request: Request) -> Response:
        chat_request = read_request(await _body(request, *_body_limits(engine)))
        response, pieces = _ChatResponse(chat_request), await _unless_left(engine.answer(chat_request), request)
        if chat_request.stream:
            return StreamingResponse(response.events(pieces), media_type="text/event-stream")
        return JSONResponse(await response.complete(pieces, request))

    api.include_router(guarded)
    return api


def _model(name: str, created: int) -> dict[str, Any]:
    return Model(id=name, created=created, object="model", owned_by="finetune").model_dump(mode="json")


def _body_limits(engine: Engine) -> tuple[int, int]:
    """Bytes of a body that is parsed, and of one that is read."""
    if any(map(engine.models.reads_pictures, engine.models.names)):
        return _PICTURE_BODY_BYTES, _PICTURE_BODY_BYTES
    return min(_BODY_BYTES, engine.max_characters * _BYTES_A_CHARACTER + 2**18), _BODY_BYTES


async def _body(request: Request, max_bytes: int, most_read: int) -> Any:
    """The JSON body. Raises RequestError if it is too large or not JSON; a body over `max_bytes` is read, but not parsed."""
    body, size = bytearray(), 0
    try:
        async with asyncio.timeout(_BODY_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > most_read:
                    raise RequestError("The body is too large.", status=413)
                if size <= max_bytes:
                    body += chunk
    except TimeoutError:
        raise RequestError("The body did not arrive in time.", status=408) from None
    except ClientDisconnect:
        raise _CLIENT_LEFT from None
    if size > max_bytes:
        raise RequestError("The body is too large for this server's limit of tokens.", status=413)
    try:
        values = parse_json(bytes(body))
        if _SURROGATE.search(body):  # half of a pair is no text
            json.dumps(values, ensure_ascii=False).encode()
    except ValueError:
        raise RequestError("The body is not JSON in UTF-8.") from None
    return values


class _ChatResponse:
    """One answer in OpenAI's form: one object, or server-sent events."""

    def __init__(self, request: ChatRequest) -> None:
        self._request, self._id, self._created = request, f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    async def complete(self, pieces: AsyncIterator[AnswerPart], request: Request) -> dict[str, Any]:
        """One object, when the answer is complete; the answer ends early if the client disconnects."""
        text, calls, end = await _unless_left(_collect(pieces), request)
        message = ChatCompletionMessage(role="assistant", content=None if calls and not text else text)
        if calls:
            message.tool_calls = [*map(_tool_call, calls)]
        values = ChatCompletion(
            id=self._id, created=self._created, model=self._request.model, object="chat.completion", usage=_usage(end),
            choices=[Choice(index=0, finish_reason=end.reason, message=message)],
        ).model_dump(mode="json", exclude_none=True)  # fmt: skip
        values["choices"][0]["message"].setdefault("content", None)
        return values

    async def events(self, pieces: AsyncIterator[AnswerPart]) -> AsyncIterator[str]:
        """Server-sent events: the role, each piece, the calls, the reason of the end, and `[DONE]`."""
        options = self._request.stream_options
        async with contextlib.aclosing(pieces):  # type: ignore[type-var]
            yield self._event(ChoiceDelta(role="assistant", content=""))
            try:
                async for piece in pieces:
                    if isinstance(piece, str):
                        yield self._event(ChoiceDelta(content=piece))
                        continue
                    if isinstance(piece, list):
                        for delta in _call_deltas(piece):
                            yield self._event(ChoiceDelta(tool_calls=[delta]))
                        continue
                    yield self._event(ChoiceDelta(), piece.reason)
                    if options and options.include_usage:
                        yield self._event(None, usage=_usage(piece))
            except RequestError as error:
                yield f"data: {json.dumps(error.as_json())}\n\n"
            yield "data: [DONE]\n\n"

    def _event(
        self,
        delta: ChoiceDelta | None,
        reason: Literal["stop", "length", "tool_calls"] | None = None,
        usage: CompletionUsage | None = None,
    ) -> str:
        chunk = ChatCompletionChunk(
            id=self._id, created=self._created, model=self._request.model, object="chat.completion.chunk", usage=usage,
            choices=[] if delta is None else [ChunkChoice(index=0, delta=delta, finish_reason=reason)],
        )  # fmt: skip
        return f"data: {chunk.model_dump_json(exclude_unset=True)}\n\n"


async def _unless_left(work: Coroutine[Any, Any, _T], request: Request) -> _T:
    """The result of `work`. When the client leaves, it is cancelled, and RequestError is raised."""
    disconnect, task = asyncio.create_task(_wait_for_disconnect(request)), asyncio.create_task(work)
    try:
        await asyncio.wait((disconnect, task), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise _CLIENT_LEFT
        return task.result()
    finally:
        disconnect.cancel()
        task.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    """Until the client has left; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        continue


async def _collect(pieces: AsyncIterator[AnswerPart]) -> tuple[str, list[Call], AnswerEnd]:
    text, calls = "", list[Any]()
    async with contextlib.aclosing(pieces):  # type: ignore[type-var]
        async for piece in pieces:
            if isinstance(piece, AnswerEnd):
                return text, calls, piece
            if isinstance(piece, str):
                text += piece
            else:
                calls += piece
    raise AssertionError("an answer has an end")


def _tool_call(call: Call) -> ChatCompletionMessageToolCall:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return ChatCompletionMessageToolCall(
        id=f"call_{uuid.uuid4().hex[:24]}", type="function", function=Function(name=function["name"], arguments=arguments)
    )


def _call_deltas(calls: list[Call]) -> Iterator[ChoiceDeltaToolCall]:
    """Each call as OpenAI streams it: id and name, then its arguments in pieces."""
    for index, call in enumerate(map(_tool_call, calls)):
        opened = ChoiceDeltaToolCallFunction(name=call.function.name, arguments="")
        yield ChoiceDeltaToolCall(index=index, id=call.id, type="function", function=opened)
        arguments = call.function.arguments
        for start in range(0, len(arguments), _ARGUMENTS_PIECE):
            piece = ChoiceDeltaToolCallFunction(arguments=arguments[start : start + _ARGUMENTS_PIECE])
            yield ChoiceDeltaToolCall(index=index, function=piece)


def _usage(end: AnswerEnd) -> CompletionUsage:
    return CompletionUsage(
        prompt_tokens=end.prompt_tokens, completion_tokens=end.tokens, total_tokens=end.prompt_tokens + end.tokens
    )
