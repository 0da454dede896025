"""One row of the data, whatever its format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from finetune.data.conversation import Message
    from finetune.data.pictures.source import PictureSource


@dataclass(frozen=True)
class Example:
    """One row, whatever its format: messages, prompt and completion, or text.

    `answers` are the indices of the messages to train on; `file` and `row` say where the row was read. A pair of answers to the
    same prompt has the rejected answer in `rejected` (its messages) or `rejected_completion`. `desirable`: whether the answer
    is marked good; None for rows without such a label. `pictures`: one for each mark in the messages' texts, in order
    (`pictures.placement`).
    """

    file: str
    row: int
    messages: tuple[Message, ...] = ()
    answers: tuple[int, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    prompt: str | None = None
    completion: str | None = None
    text: str | None = None
    rejected: tuple[Message, ...] = ()
    rejected_completion: str | None = None
    desirable: bool | None = None
    pictures: tuple[PictureSource, ...] = ()

    @property
    def is_pair(self) -> bool:
        """Whether the row has a rejected answer beside the preferred answer."""
        return bool(self.rejected) or self.rejected_completion is not None

    def pair(self) -> tuple[Example, Example]:
        """The preferred and the rejected answer as separate rows."""
        chosen = replace(self, rejected=(), rejected_completion=None)
        if not self.messages:
            return chosen, replace(chosen, completion=self.rejected_completion)
        messages = (*self.messages[: self.answers[0]], *self.rejected)
        answers = tuple(n for n in range(self.answers[0], len(messages)) if messages[n]["role"] == "assistant")
        return chosen, replace(chosen, messages=messages, answers=answers)

    def content(self) -> dict[str, Any]:
        """The content without file and row number; equal for duplicate rows."""
        fields = ("messages", "answers", "tools", "prompt", "completion", "text", "rejected", "rejected_completion")
        content = {name: getattr(self, name) for name in fields if getattr(self, name)}
        if self.pictures:
            content["pictures"] = [picture.digest for picture in self.pictures]
        return content if self.desirable is None else content | {"desirable": self.desirable}

    def question(self) -> list[Message] | str:
        """The messages before the last answer, or the prompt; empty for plain text."""
        return list(self.messages[: self.answers[-1]]) if self.messages else self.prompt or ""

    def calls(self) -> list[dict[str, Any]]:
        """The calls of tools in the last answer."""
        return list(self.messages[self.answers[-1]].get("tool_calls") or ()) if self.messages else []

    def texts(self) -> list[str]:
        """The texts of all its messages or fields."""
        messages = (*self.messages, *self.rejected)
        texts = (self.prompt, self.completion, self.text, self.rejected_completion)
        return [*(message["content"] for message in messages), *filter(None, texts)]

    def reference(self) -> str | None:
        """The last answer of the row; None for plain text, and for an answer that is only a tool call."""
        if not self.messages:
            return self.completion
        last = self.messages[self.answers[-1]]
        return None if last.get("tool_calls") and not last["content"].strip() else last["content"]
