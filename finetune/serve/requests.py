"""Requests: the fields of OpenAI's chat completions that are supported; others that would change the answer are refused."""

from __future__ import annotations

import json
import secrets
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from finetune.data.pictures.references import PictureReference
from finetune.model.generate import Sampling
from finetune.serve.messages import Message, ResponseFormat, ToolChoice, Tools, as_conversation, pictures_of

_MAX_STOPS = 4  # as OpenAI's interface
#: Fields that don't change an answer of this server.
_IGNORED = {"user", "metadata", "store", "service_tier", "stream_options", "safety_identifier", "prompt_cache_key", "verbosity"}
#: Fields that would change the answer, and the values at which they don't.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "n": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},), "logprobs": (False,),
    "top_logprobs": (0,), "functions": ([],), "function_call": ("none",), "modalities": (["text"],),
}  # fmt: skip


class RequestError(Exception):
    """A request that gets OpenAI's error object: HTTP `status`, message, the field, and the code."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def as_json(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error_types = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}
        error_type = error_types.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": error_type, "param": self.param, "code": self.code}}


class _StreamOptions(BaseModel):
    include_usage: bool = False


class ChatRequest(BaseModel):
    """A request for an answer."""

    model_config = ConfigDict(extra="allow", strict=True)

    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that the answer follows, None without one."""
        return self.response_format.schema_of_answer if self.response_format else None

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages in the form of the training data. Raises ValueError for one that can't be."""
        return as_conversation(self.messages)

    @property
    def pictures(self) -> list[PictureReference]:
        """The pictures of its messages, in order. Raises ValueError for one that can't be read."""
        return pictures_of(self.messages)

    @property
    def has_pictures(self) -> bool:
        return any(message.picture_parts for message in self.messages)

    @property
    def offered_tools(self) -> tuple[dict[str, Any], ...]:
        return () if self.tool_choice == "none" else tuple(tool.as_tool() for tool in self.tools or ())

    @property
    def has_calls(self) -> bool:
        """Whether it offers tools, or has calls or their replies among its messages."""
        return bool(self.offered_tools) or any(message.tool_calls or message.role == "tool" for message in self.messages)

    @property
    def forced_tool(self) -> str | None:
        """Name of the tool that must be called; empty if it may be any, None if none must be."""
        if isinstance(self.tool_choice, str):
            return "" if self.tool_choice == "required" else None
        return self.tool_choice.function.name

    @property
    def characters(self) -> int:
        """Characters of the prompt, as far as the request decides them."""
        tools = json.dumps(self.offered_tools, ensure_ascii=False) if self.tools else ""
        return sum(message.characters for message in self.messages) + len(tools)

    @property
    def stops(self) -> list[str]:
        """Texts before which the answer ends."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or [])

    @property
    def max_new_tokens(self) -> int | None:
        """Limit of the answer, None without one."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def sampling(self) -> Sampling:
        """The request's sampling, with the interface's own defaults: temperature 1, and another seed each time."""
        seed = secrets.randbits(63) if self.seed is None else self.seed
        return Sampling(1.0 if self.temperature is None else self.temperature, self.top_p or 1.0, seed)


def read_request(body: Any) -> ChatRequest:
    """The request in a JSON body. Raises RequestError that names the first unsupported field or value."""
    if not isinstance(body, dict):
        raise RequestError("The body must be a JSON object.")
    body = {name: value for name, value in body.items() if value is not None}
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        errors = error.errors(include_url=False)
        location, message = errors[0]["loc"], errors[0]["msg"]
        if location[:1] == ("messages",) and location[2:3] == ("content",):
            location = location[:3]
            of_pictures = (other for other in errors if other["loc"][:3] == location and "image_url" in other["loc"])
            forms = "only text and pictures, as a string or as parts of type text and image_url"
            message = next((other["msg"] for other in of_pictures), forms)
        name = ".".join(map(str, location)) or None
        raise RequestError(f"{name}: {message.removeprefix('Value error, ')}", param=name, code="invalid_value") from None
    for name, value in (request.model_extra or {}).items():
        if name in _IGNORED or value in _NEUTRAL_VALUES.get(name, ()):
            continue
        raise RequestError(f"{name} is not supported by this server.", param=name, code="unsupported_parameter")
    _check_tools(request)
    if request.has_pictures and (request.schema_of_answer is not None or request.forced_tool is not None):
        name = "response_format" if request.schema_of_answer is not None else "tool_choice"
        raise RequestError(f"{name} and pictures can't be used together here.", param=name, code="unsupported_parameter")
    if len(request.stops) > _MAX_STOPS:
        raise RequestError(f"stop: at most {_MAX_STOPS} texts", param="stop", code="invalid_value")
    if not all(request.stops):
        raise RequestError("stop: an empty text would end every answer", param="stop", code="invalid_value")
    return request


def _check_tools(request: ChatRequest) -> None:
    """Raises RequestError for a choice of a tool that is not there, and for replies to no call."""
    names = [tool.function.name for tool in request.tools or ()]
    forced = request.forced_tool
    if request.offered_tools and request.schema_of_answer is not None:
        raise RequestError("response_format and tools can't be used together here.", param="response_format",
                           code="unsupported_parameter")  # fmt: skip
    if forced is not None and not names:
        raise RequestError("tool_choice asks for a call, and there are no tools.", param="tool_choice", code="invalid_value")
    if forced and forced not in names:
        message = f"tool_choice asks for {forced[:60]!r}, which is none of the tools."
        raise RequestError(message, param="tool_choice", code="invalid_value")
    try:
        as_conversation(request.messages)
    except ValueError as error:
        raise RequestError(f"{error}.", param="messages", code="invalid_value") from None
