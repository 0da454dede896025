"""What the chat process writes: one line for a question, for each answer, and for its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from finetune.events import Event

Model = Literal["base", "tuned"]
MODELS: tuple[Model, ...] = get_args(Model)


@dataclass(frozen=True, kw_only=True)
class Question(Event):
    """A question of the page."""

    kind: ClassVar[str] = "question"

    id: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Answer(Event):
    """The whole answer of one of both models to the question of that id."""

    kind: ClassVar[str] = "answer"

    id: str
    model: Model
    text: str


@dataclass(frozen=True, kw_only=True)
class Failure(Event):
    """Why there is no answer, or only one."""

    kind: ClassVar[str] = "error"

    id: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Done(Event):
    """Both have answered."""

    kind: ClassVar[str] = "done"

    id: str


KINDS: dict[str, type[Event]] = {each.kind: each for each in (Question, Answer, Failure, Done)}
