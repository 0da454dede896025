"""Answers of a model read as its chat template writes them: text, and calls of tools."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from finetune.data.call_syntax import Answer, CallSyntax, syntax_of
from finetune.data.checks import BadRow
from finetune.data.conversation import Message
from finetune.data.template import Template, common_prefix_length
from finetune.data.tool_calls import Call

_EMPTY_THINKING = re.compile(r"^(?:<think>)?\s*</think>\s*")
_QUESTION: Message = {"role": "user", "content": "a question"}
#: Two calls to learn a template's form from; some templates allow only one call in an answer.
_PROBE: list[tuple[str, dict[str, Any]]] = [("find_it", {"place": 'a "place"', "count": 3}), ("list_all", {"kind": "x"})]


class AnswerReader:
    """Reads answers in one template's form.

    `syntax`: the form of calls, None for a template that writes none. `stops`: the token after the last call, at which
    generation stops, beside those of the template. `special_tokens` stay in the text that `read` takes, as calls have some.
    """

    def __init__(self, template: Template) -> None:
        self._template = template
        tokenizer = template.tokenizer
        specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.special_tokens = sorted(specials | {token for token in tokenizer.all_special_tokens if isinstance(token, str)})
        self._ends = {str(tokenizer.convert_ids_to_tokens(token_id)) for token_id in template.ends}
        self.syntax, end = self._learn()
        self.stops = {int(tokenizer.convert_tokens_to_ids(end))} if end else set()  # type: ignore[arg-type]
        self._ends |= {end} if end else set()

    @cached_property
    def openings(self) -> tuple[str, ...]:
        """Literal texts with which a call may begin."""
        return self.syntax.openings if self.syntax else ()

    def read(self, text: str, tools: Sequence[dict[str, Any]] = ()) -> Answer:
        """The text and the calls of an answer with its special tokens, which the result's text has not."""
        for end in self._ends:
            text = text.rstrip().removesuffix(end) if text.rstrip().endswith(end) else text
        answer = self.syntax.answer(text, tools) if self.syntax else Answer(text)
        plain = self.without_special_tokens(answer.text)
        if answer.calls:
            plain = _EMPTY_THINKING.sub("", plain).strip()
        return Answer(plain, answer.calls, answer.is_unreadable)

    def without_special_tokens(self, text: str) -> str:
        """The text as people read it."""
        for token in self.special_tokens:
            text = text.replace(token, "")
        return text

    def _learn(self) -> tuple[CallSyntax | None, str | None]:
        for count in (2, 1):
            calls = _PROBE[:count]
            try:
                prompt = self._template.render([_QUESTION], prompt=True)
                whole = self._template.render([_QUESTION, _call_message(calls)])
            except BadRow:
                continue
            text = whole[common_prefix_length(prompt, whole) :].rstrip()
            end = max((token for token in self.special_tokens if text.endswith(token)), key=len, default=None)
            if end and (syntax := syntax_of(text.removesuffix(end), calls)):
                return syntax, end
            if syntax := syntax_of(text, calls):
                return syntax, None
        return None, None


def _call_message(calls: list[tuple[str, dict[str, Any]]]) -> Message:
    converted: list[Call] = [
        {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": converted}
