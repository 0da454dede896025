"""Messages and tools of a request, in OpenAI's form, and as the training data has them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from finetune.data.checks import BadRow
from finetune.data.pictures.limits import MAX_PICTURES
from finetune.data.pictures.references import PICTURE_MARK, PictureReference, picture_reference
from finetune.data.tool_calls import name_replies, read_calls

MAX_TOOLS = 128  # as OpenAI's interface
#: Characters of a picture's data: address.
MAX_PICTURE_CHARACTERS = 12 * 2**20
_NAME = r"^[a-zA-Z0-9_.\-]{1,64}$"


class _Part(BaseModel):
    type: Literal["text"]
    text: str


class _Address(BaseModel):
    url: str = Field(max_length=MAX_PICTURE_CHARACTERS)

    @model_validator(mode="after")
    def _check(self) -> _Address:
        if not self.url[:5].lower() == "data:":  # a path would read this machine's files, an address its network
            raise ValueError("a picture must be a data: address; nothing is fetched for a request")
        return self


class _PicturePart(BaseModel):
    type: Literal["image_url"]
    image_url: _Address


class _CallFunction(BaseModel):
    name: str = Field(pattern=_NAME)
    arguments: str | dict[str, Any] = ""


class _Call(BaseModel):
    id: str = Field("", max_length=256)
    type: Literal["function"] = "function"
    function: _CallFunction


class Message(BaseModel):
    """One message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Annotated[_Part | _PicturePart, Field(discriminator="type")]] | None = None
    tool_calls: list[_Call] | None = Field(None, max_length=MAX_TOOLS)
    tool_call_id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, max_length=256)

    @model_validator(mode="after")
    def _check(self) -> Message:
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing")
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"a message of the {self.role} has no tool_calls")
        if self.picture_parts and self.role != "user":
            raise ValueError(f"a message of the {self.role} has a picture; only the user's have some")
        if self.picture_parts and any(PICTURE_MARK in part.text for part in self.content or () if isinstance(part, _Part)):
            raise ValueError("the text has the character U+FFFC, which stands for a picture; remove it")
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of a tool needs the tool_call_id of the call that it answers")
        return self

    @property
    def text(self) -> str:
        """Its text, empty without one."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text if isinstance(part, _Part) else PICTURE_MARK for part in self.content or ())

    @property
    def picture_parts(self) -> list[_PicturePart]:
        """Its pictures, in order."""
        return [] if isinstance(self.content, str) else [part for part in self.content or () if isinstance(part, _PicturePart)]

    @property
    def characters(self) -> int:
        return len(self.text) + sum(len(str(call.function.arguments)) for call in self.tool_calls or ())

    def as_message(self, path: str = "message") -> dict[str, Any]:
        """Role, text and calls in the form of the training data. Raises ValueError for arguments that are no JSON object."""
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        message |= {"pictures": len(self.picture_parts)} if self.picture_parts else {}
        if self.role == "tool":
            message |= {"tool_call_id": self.tool_call_id}
            message |= {"name": self.name} if self.name else {}
        if self.tool_calls:
            try:
                calls = read_calls([call.model_dump() for call in self.tool_calls], f"{path}.tool_calls")
            except BadRow as error:
                raise ValueError(f"{error.field}: {error.reason}") from None
            message["tool_calls"] = calls
        return message


def as_conversation(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages in the form of the training data; replies of tools have the name of the call that they answer.

    Raises ValueError for a reply to no call.
    """
    open_calls: set[str] = set()
    for index, message in enumerate(messages):
        if message.role == "assistant":
            open_calls = {call.id for call in message.tool_calls or ()}
        elif message.role == "tool" and message.tool_call_id not in open_calls:
            raise ValueError(f"messages.{index}: no call before it has the id {str(message.tool_call_id)[:60]!r}")
    converted = [message.as_message(f"messages.{index}") for index, message in enumerate(messages)]
    name_replies(converted)
    return converted


def pictures_of(messages: list[Message]) -> list[PictureReference]:
    """The pictures of all messages, in order. Raises ValueError for too many, and for a data: address without one."""
    addresses = [
        (part.image_url.url, f"messages.{index}.content")
        for index, message in enumerate(messages)
        for part in message.picture_parts
    ]
    if len(addresses) > MAX_PICTURES:
        raise ValueError(f"messages: {len(addresses)} pictures; a request has at most {MAX_PICTURES}")
    try:
        return [picture_reference(url, field) for url, field in addresses]
    except BadRow as error:
        raise ValueError(f"{error.field}: a picture {error.reason}") from None


class _Function(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=_NAME)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(BaseModel):
    type: Literal["function"]
    function: _Function

    def as_tool(self) -> dict[str, Any]:
        """The tool as templates take it: without OpenAI's `strict`, which no template knows."""
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


class _NamedFunction(BaseModel):
    name: str


class _NamedTool(BaseModel):
    type: Literal["function"]
    function: _NamedFunction


def _unique(tools: list[_Tool]) -> list[_Tool]:
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise ValueError("two tools have the same name")
    return tools


class _JsonSchema(BaseModel):
    name: str = Field(pattern=_NAME)
    definition: dict[str, Any] = Field(alias="schema")


class ResponseFormat(BaseModel):
    """The form of an answer: text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: _JsonSchema | None = None

    @model_validator(mode="after")
    def _check(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is missing")
        return self

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema of the answer, None for text."""
        if self.json_schema is not None and self.type == "json_schema":
            return self.json_schema.definition
        return {"type": "object"} if self.type == "json_object" else None


Tools = Annotated[list[_Tool], Field(max_length=MAX_TOOLS), AfterValidator(_unique)]
ToolChoice = Literal["none", "auto", "required"] | _NamedTool
