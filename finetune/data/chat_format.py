"""Infer a model's chat format from its template, and read answers in that format."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from finetune.data.checks import BadRow
from finetune.data.conversation import Message
from finetune.data.tool_calls import Answer, Call, CallSyntax, syntax_of

if TYPE_CHECKING:
    from finetune.data.template import Template

_SYSTEM: Message = {"role": "system", "content": "a rule"}
_QUESTION: Message = {"role": "user", "content": "a question"}
_ANSWER, _THOUGHT = "the answer ends here", "the thought ends here"
_REPLY: Message = {"role": "assistant", "content": _ANSWER}
#: Two calls, to tell their form and separator; some templates allow only one call in an answer.
_CALLS: list[tuple[str, dict[str, Any]]] = [("find_it", {"place": 'a "place"', "count": 3}), ("list_all", {"kind": "x"})]
#: An id as OpenAI writes it.
_LONG_ID = "call_8hPZJmTJwkYbVqKfGxOpLcDn"


class CallForm(NamedTuple):
    """How a template takes tool calls."""

    #: Takes a call's arguments as JSON text.
    as_text: bool = False
    #: Requires ids: `own` of any form, or `short` of nine letters and digits.
    ids: Literal["", "own", "short"] = ""


@dataclass(frozen=True)
class ThoughtMarks:
    """Text before and after a thought."""

    opening: str
    closing: str
    #: The generation prompt has the opening, so answers lack it.
    is_prompted: bool = False

    def split(self, text: str, *, is_cut: bool = False) -> tuple[str, str] | None:
        """Split a text into thought and answer; None without a thought."""
        opening, closing, begins = self.opening.strip(), self.closing.strip(), text.lstrip()
        has_opening = bool(opening) and begins.startswith(opening)
        if not has_opening and not self.is_prompted:
            return None
        thought, mark, answer = begins[len(opening) * has_opening :].partition(closing)
        if not mark:
            # an answer that was cut by the token limit may have no closing
            return (thought.strip(), "") if is_cut else None
        space = self.closing[len(self.closing.rstrip()) :]
        return thought.strip(), answer.removeprefix(space) if space and answer.startswith(space) else answer.lstrip("\n")


#: The marks in rows, and in answers of models whose template has none.
TAGS = ThoughtMarks("<think>", "</think>")


class ChatFormat:
    """Text and tokens that a template writes around answers."""

    def __init__(self, template: Template) -> None:
        self._template, self._tokenizer = template, template.tokenizer
        #: Removed from texts that are read.
        self.special_tokens = template.special_tokens
        self._first_letters = {token[:1] for token in self.special_tokens}  # most texts have no such letter
        unwritten, plain = self._written(_REPLY)
        #: The generation prompt opens a thought that the template does not write.
        self.opens_thought = bool(unwritten.strip())
        opening, answer, after = plain.rpartition(_ANSWER)  # without an answer where it must be a list of parts
        self._answer_opening = opening if answer else ""  # such as a channel; empty if it is an empty thought
        #: Text between the generation prompt and an answer without a thought, such as an empty thought.
        self.before_answer = "" if self.opens_thought else self._answer_opening
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        closing = until([*added, *self.special_tokens], after) if answer else ""
        self._answer_closing = closing if closing != after else after.rstrip()  # such as </answer>, or a space
        eos_ids = {self._tokenizer.eos_token_id} - {None}
        ends = self._first_special(after.removeprefix(self._answer_closing))
        _, continued = self._written(_REPLY, {"role": "user", "content": "more"})
        inside = self._first_special(continued.rpartition(_ANSWER)[2].removeprefix(self._answer_closing))
        self._after_calls = ""
        #: Form of calls, None if the template writes none; ids at which generation stops after the last call.
        self.syntax, self.call_stops, followed = self._learn_calls()
        #: Texts that may begin a call.
        self.call_openings = self.syntax.openings if self.syntax else ()
        #: Ids that end an answer in a conversation; ids at which generation stops after an answer.
        self.ends, self.stops = eos_ids | inside | ends | followed, eos_ids | (ends or inside)
        #: Texts of `ends`, and of `stops`, each with `call_stops`.
        self._end_tokens, self.stop_tokens = (
            [str(name) for name in self._tokenizer.convert_ids_to_tokens(sorted(ids | self.call_stops))]
            for ids in (self.ends, self.stops)
        )
        #: Whether a message's reasoning is written, by whether the message has calls.
        self.writes_thought = {True: False, False: False}
        #: In the order in which `split` tries them.
        self.marks = self._learn_marks()

    @cached_property
    def literals(self) -> tuple[str, ...]:
        """Return all marks, which a streamed piece may cut in two."""
        marks = [text.strip() for form in self.marks for text in (form.opening, form.closing)]
        return tuple(filter(None, [*marks, self._answer_opening, self._answer_closing.strip(), *self._end_tokens]))

    def with_thought(self, message: Message) -> Message:
        """Move a `<think>` block to the reasoning if the template writes reasoning."""
        if message["role"] != "assistant" or "reasoning_content" in message:
            return message
        thought, text = thought_and_text(message)
        if not thought or not self.writes_thought[bool(message.get("tool_calls"))]:
            return message
        return {**message, "reasoning_content": thought, "content": text}

    def read(self, text: str, tools: Sequence[dict[str, Any]] | None = (), *, is_cut: bool = False) -> Answer:
        """Read a decoded answer; with `tools=None` calls stay text."""
        thought, text = self.split(text, is_cut=is_cut)
        answer = self.syntax.answer(text, tools) if self.syntax and tools is not None else Answer(text)
        if answer.calls:
            answer = replace(answer, text=answer.text.removesuffix(self._after_calls).strip())
        return replace(answer, text=self.without_special_tokens(answer.text), thought=self.without_special_tokens(thought))

    def header_end(self, text: str) -> int:
        """Return the end of the first assistant header. Raise BadRow without a header."""
        prompt = self._template.render([_QUESTION], prompt=True).rpartition(_QUESTION["content"])[2]
        # the longest end of the generation prompt that begins a turn and is in the text, with or without trailing white space
        for begin in range(len(prompt.rstrip())):
            begins_turn = prompt[:begin].endswith("\n") or prompt.startswith(tuple(self.special_tokens), begin)
            for header in (prompt[begin:], prompt[begin:].rstrip()) if begins_turn else ():
                if header in text:
                    return text.index(header) + len(header)
        raise BadRow("messages", "the assistant speaks first, which the chat template writes in another form")

    def split(self, text: str, *, is_cut: bool = False) -> tuple[str, str]:
        for end in self._end_tokens:
            text = text.rstrip().removesuffix(end) if text.rstrip().endswith(end) else text
        thought, text = next(filter(None, (marks.split(text, is_cut=is_cut) for marks in self.marks)), ("", text))
        closing = self._answer_closing.rstrip() or self._answer_closing
        text = text.rstrip() if closing.strip() and text.rstrip().endswith(closing) else text
        return thought, text.removeprefix(self._answer_opening).removesuffix(closing)

    def without_special_tokens(self, text: str) -> str:
        for token in self.special_tokens if any(first in text for first in self._first_letters) else ():
            text = text.replace(token, "")
        return text

    def _written(self, *messages: Message) -> tuple[str, str]:
        """Return the omitted end of the generation prompt, and the messages' text."""
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
        ids: tuple[Literal["", "own", "short"], ...] = ("", "own", "short")
        for form, as_text, count in itertools.product(ids, (False, True), (2, 1)):
            self._template.call_form = CallForm(as_text, form)
            message = _call_message(_CALLS[:count])
            text = self._written(message)[1].rstrip()
            end = max((token for token in self.special_tokens if text.endswith(token)), key=len, default="")
            syntax = syntax_of(text.removesuffix(end), _CALLS[:count])
            if syntax is None:  # the token is a part of the calls
                syntax, end = syntax_of(text, _CALLS[:count]), ""
            if syntax is None or not self._written(_call_message(_CALLS[:count], id=_LONG_ID))[1]:
                continue
            if end:
                return syntax, {int(self._tokenizer.convert_tokens_to_ids(end))}, set()  # type: ignore[arg-type]
            self._after_calls = syntax.answer(text).text
            replies: list[Message] = [{"role": "tool", "name": name, "content": "found"} for name, _ in _CALLS[:count]]
            continued = self._written(message, *replies)[1]
            # without an end token, the first special token of the tool's reply ends the calls, and also an answer
            following = self._first_special(continued.removeprefix(text)) if continued.startswith(text) else set()
            return syntax, following, following
        self._template.call_form = CallForm()
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
    """Return a message's reasoning, also from a `<think>` block, and its text."""
    if "reasoning_content" in message:
        return message["reasoning_content"], message["content"]
    return TAGS.split(message["content"]) or ("", message["content"])


def until(tokens: Sequence[str], text: str) -> str:
    """Cut a text at the first of these tokens."""
    return text[: min((position for token in tokens if (position := text.find(token)) >= 0), default=len(text))]


def without_space(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())


def common_prefix_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common prefix."""
    return len(first if second[: len(first)] == first else commonprefix([first, second]))  # type: ignore[list-item]


def _call_message(calls: list[tuple[str, dict[str, Any]]], **more: str) -> Message:
    converted: list[Call] = [
        {"type": "function", "function": {"name": name, "arguments": arguments}, **more} for name, arguments in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": converted}
