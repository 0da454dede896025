"""Events that the chat process writes: one line for a question, for each answer, and for its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from finetune.events import Event

#: Who answers: `base` or `tuned` of the run that the conversation belongs to, or of another one, such as `tuned/RUN`.
Model = str
MODELS: tuple[Model, ...] = ("base", "tuned")


@dataclass(frozen=True, kw_only=True)
class Question(Event):
    """A question of the page."""

    kind: ClassVar[str] = "question"

    id: str
    text: str
    models: tuple[Model, ...] = MODELS
    #: Names of its files.
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Piece(Event):
    """The next piece of an answer that is being generated."""

    kind: ClassVar[str] = "piece"

    id: str
    model: Model
    text: str


@dataclass(frozen=True, kw_only=True)
class Answer(Event):
    """The whole answer of a model to the question of that id, its calls of tools, how fast it was, and whether it was stopped.

    `alone`: the model was loaded in place of the other one, as both may not fit.
    """

    kind: ClassVar[str] = "answer"

    id: str
    model: Model
    text: str
    tokens: int | None = None
    tokens_per_s: float | None = None
    stopped: bool = False
    calls: tuple[dict[str, Any], ...] = ()
    alone: bool = False


@dataclass(frozen=True, kw_only=True)
class Failure(Event):
    """Why there is no answer, or only one."""

    kind: ClassVar[str] = "error"

    id: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Done(Event):
    """All that were asked have answered."""

    kind: ClassVar[str] = "done"

    id: str


KINDS: dict[str, type[Event]] = {event.kind: event for event in (Question, Piece, Answer, Failure, Done)}
