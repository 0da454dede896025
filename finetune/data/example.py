"""One row of the data in any format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.data.conversation import Message
    from finetune.data.pictures.source import PictureSource


@dataclass(frozen=True)
class Example:
    """One row: messages, prompt and completion, or text."""

    #: Where the row was read.
    file: str
    row: int
    messages: tuple[Message, ...] = ()
    #: Indices of the messages to train on.
    answers: tuple[int, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    #: The rejected answer of a pair, as messages or as a completion.
    rejected: tuple[Message, ...] = ()
    rejected_completion: str | None = None
    #: The answer is marked good; None for rows without a label.
    desirable: bool | None = None
    #: One for each mark in the messages' texts, in order (`pictures.placement`).
    pictures: tuple[PictureSource, ...] = ()

    @property
    def is_pair(self) -> bool:
        return bool(self.rejected) or self.rejected_completion is not None

    def pair(self) -> tuple[Example, Example]:
        """Split a pair into the preferred and the rejected row."""
        chosen = replace(self, rejected=(), rejected_completion=None)
        if not self.messages:
            return chosen, replace(chosen, completion=self.rejected_completion)
        messages = (*self.messages[: self.answers[0]], *self.rejected)
        answers = tuple(n for n in range(self.answers[0], len(messages)) if messages[n]["role"] == "assistant")
        return chosen, replace(chosen, messages=messages, answers=answers)

    def content(self) -> dict[str, Any]:
        """Return the content, equal for duplicate rows."""
        fields = ("messages", "answers", "tools", "prompt", "completion", "text", "rejected", "rejected_completion")
        content = {name: getattr(self, name) for name in fields if getattr(self, name)}
        if self.pictures:
            content["pictures"] = [picture.digest for picture in self.pictures]
        return content if self.desirable is None else content | {"desirable": self.desirable}

    def question(self) -> list[Message] | str:
        """Return the messages before the last answer, or the prompt."""
        return list(self.messages[: self.answers[-1]]) if self.messages else self.prompt or ""

    def calls(self) -> list[dict[str, Any]]:
        return list(self.messages[self.answers[-1]].get("tool_calls") or ()) if self.messages else []

    def texts(self) -> list[str]:
        messages = (*self.messages, *self.rejected)
        texts = (self.prompt, self.completion, self.text, self.rejected_completion)
        return [*(message["content"] for message in messages), *filter(None, texts)]

    def reference(self) -> str | None:
        """Return the last answer; None for plain text and for a mere tool call."""
        if not self.messages:
            return self.completion
        last = self.messages[self.answers[-1]]
        return None if last.get("tool_calls") and not last["content"].strip() else last["content"]
