"""A model's chat format, learned from its template by rendering probes; reads answers in it: thought, text and calls."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from finetune.data.call_syntax import Answer, CallSyntax, syntax_of
from finetune.data.checks import BadRow
from finetune.data.conversation import Message
from finetune.data.tool_calls import Call

if TYPE_CHECKING:
    from finetune.data.template import Template

_SYSTEM: Message = {"role": "system", "content": "a rule"}
_QUESTION: Message = {"role": "user", "content": "a question"}
_ANSWER, _THOUGHT = "the answer ends here", "the thought ends here"
_REPLY: Message = {"role": "assistant", "content": _ANSWER}
#: Two calls, to tell their form and what separates them; some templates allow only one call in an answer.
_CALLS: list[tuple[str, dict[str, Any]]] = [("find_it", {"place": 'a "place"', "count": 3}), ("list_all", {"kind": "x"})]


@dataclass(frozen=True)
class ThoughtMarks:
    """The text before and after a thought. `is_prompted`: the generation prompt has the opening, so that answers lack it."""

    opening: str
    closing: str
    is_prompted: bool = False

    def split(self, text: str, *, is_cut: bool = False) -> tuple[str, str] | None:
        """The thought and the text after it; None if there is no thought. `is_cut`: the text was stopped before its end."""
        opening, closing, begins = self.opening.strip(), self.closing.strip(), text.lstrip()
        has_opening = bool(opening) and begins.startswith(opening)
        if not has_opening and not self.is_prompted:
            return None
        thought, mark, answer = begins[len(opening) * has_opening :].partition(closing)
        if not mark:
            return (thought.strip(), "") if is_cut else None
        space = self.closing[len(self.closing.rstrip()) :]
        return thought.strip(), answer.removeprefix(space) if space and answer.startswith(space) else answer.lstrip("\n")


#: The marks in rows, and in answers of models whose template has none.
TAGS = ThoughtMarks("<think>", "</think>")


class ChatFormat:
    """The texts and tokens that a template writes around answers, thoughts and calls.

    - ends: ids that end an answer in a conversation
    - stops, call_stops: ids at which generation stops, after an answer and after its last call; stop_tokens: their texts
    - marks: of thoughts that are read
    - opens_thought: whether the generation prompt opens a thought that the template does not write
    - before_answer: text between the generation prompt and an answer without a thought, such as an empty thought
    - writes_thought: whether a message's reasoning is written, by whether the message has calls
    - syntax, call_openings: form of calls, None if the template writes none; texts that may begin a call
    - special_tokens: removed from texts that are read
    """

    def __init__(self, template: Template) -> None:
        self._template, self._tokenizer = template, template.tokenizer
        self.special_tokens = template.special_tokens
        self._first_letters = {token[:1] for token in self.special_tokens}  # most texts have none of them
        unwritten, plain = self._written(_REPLY)
        self.opens_thought = bool(unwritten.strip())
        opening, answer, after = plain.rpartition(_ANSWER)  # without an answer where it must be a list of parts
        self._answer_opening = opening if answer else ""  # such as a channel; empty if it is an empty thought
        self.before_answer = "" if self.opens_thought else self._answer_opening
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        closing = until([*added, *self.special_tokens], after) if answer else ""
        self._answer_closing = closing if closing != after else after.rstrip()  # such as </answer>, or a space
        eos_ids = {self._tokenizer.eos_token_id} - {None}
        ends = self._first_special(after.removeprefix(self._answer_closing))
        _, continued = self._written(_REPLY, {"role": "user", "content": "more"})
        inside = self._first_special(continued.rpartition(_ANSWER)[2].removeprefix(self._answer_closing))
        self._after_calls = ""
        self.syntax, self.call_stops, followed = self._learn_calls()
        self.call_openings = self.syntax.openings if self.syntax else ()
        self.ends, self.stops = eos_ids | inside | ends | followed, eos_ids | (ends or inside)
        self._end_tokens, self.stop_tokens = (
            [str(name) for name in self._tokenizer.convert_ids_to_tokens(sorted(ids | self.call_stops))]
            for ids in (self.ends, self.stops)
        )
        self.writes_thought = {True: False, False: False}
        self.marks = self._learn_marks()

    @cached_property
    def literals(self) -> tuple[str, ...]:
        """Marks, ends and openings around an answer; the end of a streamed piece may be a part of one."""
        marks = [text.strip() for form in self.marks for text in (form.opening, form.closing)]
        return tuple(filter(None, [*marks, self._answer_opening, self._answer_closing.strip(), *self._end_tokens]))

    def with_thought(self, message: Message) -> Message:
        """A message whose `<think>` block is its reasoning, if the template writes one."""
        if message["role"] != "assistant" or "reasoning_content" in message:
            return message
        thought, text = thought_and_text(message)
        if not thought or not self.writes_thought[bool(message.get("tool_calls"))]:
            return message
        return {**message, "reasoning_content": thought, "content": text}

    def read(self, text: str, tools: Sequence[dict[str, Any]] | None = (), *, is_cut: bool = False) -> Answer:
        """Read an answer that was decoded with its special tokens. Without `tools` (None) it has no calls.

        is_cut: generation stopped before the answer's end, so a thought may have no end.
        """
        thought, text = self.split(text, is_cut=is_cut)
        answer = self.syntax.answer(text, tools) if self.syntax and tools is not None else Answer(text)
        if answer.calls:
            answer = replace(answer, text=answer.text.removesuffix(self._after_calls).strip())
        return replace(answer, text=self.without_special_tokens(answer.text), thought=self.without_special_tokens(thought))

    def header_end(self, text: str) -> int:
        """The end of the first header of an assistant turn in a conversation's text. Raises BadRow without a header."""
        prompt = self._template.render([_QUESTION], prompt=True).rpartition(_QUESTION["content"])[2]
        for begin in range(len(prompt.rstrip())):
            begins_turn = prompt[:begin].endswith("\n") or prompt.startswith(tuple(self.special_tokens), begin)
            for header in (prompt[begin:], prompt[begin:].rstrip()) if begins_turn else ():
                if header in text:
                    return text.index(header) + len(header)
        raise BadRow("messages", "the assistant speaks first, which the chat template writes in another form")

    def split(self, text: str, *, is_cut: bool = False) -> tuple[str, str]:
        """The thought of an answer, and its text with calls, which may have special tokens."""
        for end in self._end_tokens:
            text = text.rstrip().removesuffix(end) if text.rstrip().endswith(end) else text
        thought, text = next(filter(None, (marks.split(text, is_cut=is_cut) for marks in self.marks)), ("", text))
        closing = self._answer_closing.rstrip() or self._answer_closing
        text = text.rstrip() if closing.strip() and text.rstrip().endswith(closing) else text
        return thought, text.removeprefix(self._answer_opening).removesuffix(closing)

    def without_special_tokens(self, text: str) -> str:
        """The text as people read it."""
        for token in self.special_tokens if any(first in text for first in self._first_letters) else ():
            text = text.replace(token, "")
        return text

    def _written(self, *messages: Message) -> tuple[str, str]:
        """The end of the generation prompt that the template leaves out before these messages, and their text."""
        for head in ([_QUESTION], [_SYSTEM, _QUESTION]):  # some templates require a system message
            with contextlib.suppress(BadRow):
                prompt = self._template.render(head, prompt=True)
                whole = self._template.render([*head, *messages])
                length = common_prefix_length(prompt, whole)
                if length < len(prompt):
                    length = self._template.token_boundary(prompt, whole, length)
                return prompt[length:], whole[length:]
        return "", ""

    def _first_special(self, text: str) -> set[int]:
        ids = self._tokenizer.encode(text.lstrip(), add_special_tokens=False)
        return {ids[0]} if ids and ids[0] in self._tokenizer.added_tokens_decoder else set()

    def _learn_calls(self) -> tuple[CallSyntax | None, set[int], set[int]]:
        """The form of calls, the id after the last call, and the id with which a template without that ends a call."""
        for count in (2, 1):
            message = _call_message(_CALLS[:count])
            text = self._written(message)[1].rstrip()
            syntax, end = syntax_and_end(text, _CALLS[:count], self.special_tokens)
            if end:
                return syntax, {int(self._tokenizer.convert_tokens_to_ids(end))}, set()  # type: ignore[arg-type]
            if syntax:
                self._after_calls = syntax.answer(text).text
                replies: list[Message] = [{"role": "tool", "name": name, "content": "found"} for name, _ in _CALLS[:count]]
                continued = self._written(message, *replies)[1]
                following = self._first_special(continued.removeprefix(text)) if continued.startswith(text) else set()
                return syntax, following, following
        return None, set(), set()

    def _learn_marks(self) -> list[ThoughtMarks]:
        marks: list[ThoughtMarks] = []
        call, in_text = _call_message(_CALLS[:1]), f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"
        field = {"reasoning_content": _THOUGHT}
        for message in ({**_REPLY, **field}, {**_REPLY, "content": in_text}, {**call, **field}):
            opening, thought, following = self._written(message)[1].partition(_THOUGHT)
            has_calls = "tool_calls" in message
            if "reasoning_content" in message:
                self.writes_thought[has_calls] = bool(thought)
            closing = following.removesuffix(self._written(call)[1]) if has_calls else following.partition(_ANSWER)[0]
            if marks or not (thought and closing.strip()):
                continue
            is_prompted = not opening.strip()
            may_be_empty = is_prompted or opening.strip() in self._answer_opening
            if not has_calls and may_be_empty and without_space(self._answer_opening).endswith(without_space(closing)):
                self._answer_opening = ""  # it is an empty thought
            elif not has_calls and closing.strip() != self._answer_opening.strip():
                closing = closing.removesuffix(self._answer_opening)
            if is_prompted:  # the prompt has the opening, which only tags tell
                opening = closing.strip().replace("</", "<", 1) if "</" in closing else ""
            is_text = message["content"] == in_text and (opening.strip(), closing.strip()) == (TAGS.opening, TAGS.closing)
            if not is_text:
                marks.append(ThoughtMarks(opening, closing, is_prompted))
        return [*marks, replace(TAGS, is_prompted=self.opens_thought)]


def thought_and_text(message: Message) -> tuple[str, str]:
    """A message's reasoning and text; the reasoning may be a `<think>` block at the beginning of the content."""
    if "reasoning_content" in message:
        return message["reasoning_content"], message["content"]
    return TAGS.split(message["content"]) or ("", message["content"])


def syntax_and_end(
    text: str, calls: list[tuple[str, dict[str, Any]]], special_tokens: Sequence[str]
) -> tuple[CallSyntax | None, str]:
    """The form in which a rendered text has exactly these calls, and the special token after them."""
    text = text.rstrip()
    end = max((token for token in special_tokens if text.endswith(token)), key=len, default="")
    if end and (syntax := syntax_of(text.removesuffix(end), calls)):
        return syntax, end
    return syntax_of(text, calls), ""


def until(tokens: Sequence[str], text: str) -> str:
    """The text before the first of these tokens."""
    return text[: min((position for token in tokens if (position := text.find(token)) >= 0), default=len(text))]


def without_space(text: str) -> str:
    """The text without any white space."""
    return "".join(text.split())


def common_prefix_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Length of the common prefix of two texts or lists of ids."""
    return len(first if second[: len(first)] == first else commonprefix([first, second]))  # type: ignore[list-item]


def _call_message(calls: list[tuple[str, dict[str, Any]]]) -> Message:
    converted: list[Call] = [
        {"type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": converted}
