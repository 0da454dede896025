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
_LONG_ID = "call_8hPZJmTJwkYbVqKfGxOpLcDn"  # an id as OpenAI writes it


class CallForm(NamedTuple):
    """How a template takes tool calls."""

    as_text: bool = False  # takes a call's arguments as JSON text, not as an object
    #: Requires ids: the row's `own` in any form, or `short` ids of nine letters and digits.
    ids: Literal["", "own", "short"] = ""


@dataclass(frozen=True)
class ThoughtMarks:
    """Text before and after a thought."""

    opening: str
    closing: str
    is_prompted: bool = False  # the generation prompt has the opening, so answers lack it

    def split(self, text: str, *, is_cut: bool = False) -> tuple[str, str] | None:
        """Split a text into thought and answer; None without a thought."""
        opening, text = self.opening.strip(), text.lstrip()
        if not self.is_prompted and not (opening and text.startswith(opening)):
            return None
        thought, closing, answer = text.removeprefix(opening).partition(self.closing.strip())
        if not closing:
            # an answer that was cut by the token limit may have no closing
            return (thought.strip(), "") if is_cut else None
        space = self.closing[len(self.closing.rstrip()) :]  # the template's, before the answer
        return thought.strip(), answer.removeprefix(space) if space and answer.startswith(space) else answer.lstrip("\n")


#: The marks in rows, and in answers of models whose template has none.
TAGS = ThoughtMarks("<think>", "</think>")


class ChatFormat:
    """Text and tokens that a template writes around answers."""

    def __init__(self, template: Template) -> None:
        self._template, self._tokenizer = template, template.tokenizer
        self.special_tokens = template.special_tokens  # removed from texts that are read
        self._first_letters = {token[:1] for token in self.special_tokens}  # most texts have no such letter
        # the template's text around the answer of a probe conversation
        omitted_prompt, written = self._written(_REPLY)
        #: The generation prompt opens a thought that the template does not write.
        self.opens_thought = bool(omitted_prompt.strip())
        opening, answer, after = written.rpartition(_ANSWER)  # no answer where the template needs a list of content parts
        self._answer_opening = opening if answer else ""  # such as a channel; empty if it is an empty thought
        #: Text between the generation prompt and an answer without a thought, such as an empty thought.
        self.before_answer = "" if self.opens_thought else self._answer_opening
        added = [token.content for token in self._tokenizer.added_tokens_decoder.values()]
        closing = before_first([*added, *self.special_tokens], after) if answer else ""
        self._answer_closing = closing if closing != after else after.rstrip()  # such as </answer>, or a space
        eos_ids = {self._tokenizer.eos_token_id} - {None}
        last_answer_ends = self._first_added_token(after.removeprefix(self._answer_closing))
        _, continued = self._written(_REPLY, {"role": "user", "content": "more"})
        earlier_answer_ends = self._first_added_token(continued.rpartition(_ANSWER)[2].removeprefix(self._answer_closing))
        self._after_calls = ""  # text that the template writes after the last call
        #: Syntax of calls, None if the template writes none; ids at which generation stops after the last call.
        self.syntax, self.call_stops, call_ends = self._learn_calls()
        self.call_openings = self.syntax.openings if self.syntax else ()  # texts that may begin a call
        self.ends = eos_ids | earlier_answer_ends | last_answer_ends | call_ends  # ids that end an answer in a conversation
        self.stops = eos_ids | (last_answer_ends or earlier_answer_ends)  # ids at which generation stops after an answer
        #: Texts of `ends`, and of `stops`, each with `call_stops`.
        self._end_tokens, self.stop_tokens = (
            [str(token) for token in self._tokenizer.convert_ids_to_tokens(sorted(ids | self.call_stops))]
            for ids in (self.ends, self.stops)
        )
        #: Whether a message's reasoning is written, by whether the message has calls.
        self.writes_thought = {True: False, False: False}
        self.marks = self._learn_marks()  # in the order in which `split` tries them

    @cached_property
    def literals(self) -> tuple[str, ...]:
        """Return all texts around thoughts and answers, which a streamed piece may cut in two."""
        marks = [text.strip() for thought_marks in self.marks for text in (thought_marks.opening, thought_marks.closing)]
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
        rendered = self._template.render([_QUESTION], add_generation_prompt=True)
        after_question = rendered.rpartition(_QUESTION["content"])[2]
        # the longest end of the generation prompt that begins a turn and is in the text, with or without trailing white space
        for start in range(len(after_question.rstrip())):
            prompt_end = after_question[start:]
            begins_turn = after_question[:start].endswith("\n") or prompt_end.startswith(tuple(self.special_tokens))
            for header in (prompt_end, prompt_end.rstrip()) if begins_turn else ():
                if header in text:
                    return text.index(header) + len(header)
        raise BadRow("messages", "the assistant speaks first, which the chat template writes in another form")

    def split(self, text: str, *, is_cut: bool = False) -> tuple[str, str]:
        """Split a decoded answer into thought and text, without end tokens."""
        for end_token in self._end_tokens:
            if text.rstrip().endswith(end_token):
                text = text.rstrip().removesuffix(end_token)
        splits = (marks.split(text, is_cut=is_cut) for marks in self.marks)
        thought, text = next(filter(None, splits), ("", text))
        closing = self._answer_closing.rstrip() or self._answer_closing
        if closing.strip() and text.rstrip().endswith(closing):
            text = text.rstrip()
        return thought, text.removeprefix(self._answer_opening).removesuffix(closing)

    def without_special_tokens(self, text: str) -> str:
        if any(letter in text for letter in self._first_letters):
            for token in self.special_tokens:
                text = text.replace(token, "")
        return text

    def _written(self, *messages: Message) -> tuple[str, str]:
        """Return the end of the generation prompt that the template omits, and the messages' text."""
        for opening_messages in ([_QUESTION], [_SYSTEM, _QUESTION]):  # some templates require a system message
            with contextlib.suppress(BadRow):
                prompt = self._template.render(opening_messages, add_generation_prompt=True)
                conversation = self._template.render([*opening_messages, *messages])
                length = common_prefix_length(prompt, conversation)
                if length < len(prompt):
                    length = self._template.token_boundary(prompt, conversation, length)
                return prompt[length:], conversation[length:]
        return "", ""

    def _first_added_token(self, text: str) -> set[int]:  # its id, or no id if text comes first
        ids = self._tokenizer.encode(text.lstrip(), add_special_tokens=False)
        return {ids[0]} if ids and ids[0] in self._tokenizer.added_tokens_decoder else set()

    def _learn_calls(self) -> tuple[CallSyntax | None, set[int], set[int]]:
        id_kinds: tuple[Literal["", "own", "short"], ...] = ("", "own", "short")
        # the first way of passing calls that the template writes completely
        for id_kind, as_text, count in itertools.product(id_kinds, (False, True), (2, 1)):
            self._template.call_form = CallForm(as_text, id_kind)
            calls = _CALLS[:count]
            message = _call_message(calls)
            text = self._written(message)[1].rstrip()
            end_token = max((token for token in self.special_tokens if text.endswith(token)), key=len, default="")
            syntax = syntax_of(text.removesuffix(end_token), calls)
            if syntax is None:  # the token is a part of the calls
                syntax, end_token = syntax_of(text, calls), ""
            if syntax is None or not self._written(_call_message(calls, id=_LONG_ID))[1]:
                continue
            if end_token:
                return syntax, {int(self._tokenizer.convert_tokens_to_ids(end_token))}, set()  # type: ignore[arg-type]
            self._after_calls = syntax.answer(text).text
            replies: list[Message] = [{"role": "tool", "name": name, "content": "found"} for name, _ in calls]
            continued = self._written(message, *replies)[1]
            # without an end token, the first token of the tool's reply ends the calls, and also an answer
            reply_start = self._first_added_token(continued.removeprefix(text)) if continued.startswith(text) else set()
            return syntax, reply_start, reply_start
        self._template.call_form = CallForm()
        return None, set(), set()

    def _learn_marks(self) -> list[ThoughtMarks]:
        marks: list[ThoughtMarks] = []
        call, tagged_reply = _call_message(_CALLS[:1]), f"<think>\n{_THOUGHT}\n</think>\n\n{_ANSWER}"
        thought_field = {"reasoning_content": _THOUGHT}
        for message in ({**_REPLY, **thought_field}, {**_REPLY, "content": tagged_reply}, {**call, **thought_field}):
            opening, thought, after_thought = self._written(message)[1].partition(_THOUGHT)
            has_calls = "tool_calls" in message
            if "reasoning_content" in message:
                self.writes_thought[has_calls] = bool(thought)
            closing = after_thought.removesuffix(self._written(call)[1]) if has_calls else after_thought.partition(_ANSWER)[0]
            if marks or not (thought and closing.strip()):
                continue
            is_prompted = not opening.strip()
            may_be_empty = is_prompted or opening.strip() in self._answer_opening
            if not has_calls and may_be_empty and without_space(self._answer_opening).endswith(without_space(closing)):
                self._answer_opening = ""  # it is an empty thought
            elif not has_calls and closing.strip() != self._answer_opening.strip():
                closing = closing.removesuffix(self._answer_opening)
            if is_prompted:  # the prompt has the opening, which is known only for tags: <think> from </think>
                opening = closing.strip().replace("</", "<", 1) if "</" in closing else ""
            has_usual_tags = (opening.strip(), closing.strip()) == (TAGS.opening, TAGS.closing)
            if message["content"] != tagged_reply or not has_usual_tags:  # else the template copied the text
                marks.append(ThoughtMarks(opening, closing, is_prompted))
        return [*marks, replace(TAGS, is_prompted=self.opens_thought)]


def thought_and_text(message: Message) -> tuple[str, str]:
    """Return a message's reasoning, also from a `<think>` block, and its text."""
    if "reasoning_content" in message:
        return message["reasoning_content"], message["content"]
    return TAGS.split(message["content"]) or ("", message["content"])


def before_first(tokens: Sequence[str], text: str) -> str:
    """Return the text before the first of these tokens, or the whole text."""
    positions = (text.find(token) for token in tokens)
    return text[: min((position for position in positions if position >= 0), default=len(text))]


def without_space(text: str) -> str:
    """Return the text without white space."""
    return "".join(text.split())


def common_prefix_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Return the length of the common prefix."""
    # commonprefix compares item by item, slowly: a prompt is usually a prefix
    return len(first if second[: len(first)] == first else commonprefix([first, second]))  # type: ignore[list-item]


def _call_message(calls: list[tuple[str, dict[str, Any]]], **fields: str) -> Message:
    tool_calls: list[Call] = [
        {"type": "function", "function": {"name": name, "arguments": arguments}, **fields} for name, arguments in calls
    ]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}
