"""Chat templates: a conversation as text, and the spans of that text to train on."""

from __future__ import annotations

import json
import math
import re
import signal
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from finetune.data.checks import BadRow
from finetune.data.conversation import REASONING, Message
from finetune.data.formats import Example
from finetune.data.report import shown
from finetune.data.tool_calls import is_written
from finetune.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
_MARKER = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_ANY_MARKER = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
#: Largest product of constants in a chat template; no template needs one.
_LARGEST_PRODUCT = 1_000_000
#: Llama's templates write today's date unless one is given; this is their own fallback.
_FIXED = {"date_string": "26 Jul 2024"}

#: Seconds that a template may take for a conversation; usually it takes a thousandth of that.
RENDER_S = 20.0


@dataclass
class Rendered:
    """Text as the model sees it. `spans` of the answers are (start, end) in characters."""

    text: str
    spans: list[Span]
    notes: set[str] = field(default_factory=set)  # for the report: unprompted, altered
    literal: list[Span] = field(default_factory=list)  # special tokens in the row's own text, which stay text


class Template:
    """The chat template of a tokenizer, rendered only through transformers' sandbox.

    `ends` are the ids that may end an answer: the tokenizer's EOS, and what the template writes after an answer, last or not.
    `stops` are those that end the last answer: where generation stops.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.source = _source(tokenizer)
        self.has_markers = bool(_MARKER.search(self.source))
        self.writes_today = "strftime_now" in self.source and "date_string" not in self.source
        self.fixed = {name: value for name, value in _FIXED.items() if name in self.source}
        self._reasoning = next((name for name in REASONING if re.search(rf"[.\['\"]{name}\b", self.source)), REASONING[0])
        self._values: dict[str, Any] = {**tokenizer.special_tokens_map, **self.fixed}
        self._calls_as: tuple[bool, bool] | None = None
        eos = {tokenizer.eos_token_id} - {None}
        inside, last = self._after_an_answer(goes_on=True), self._after_an_answer(goes_on=False)
        self.ends, self.stops = eos | inside | last, eos | (last or inside)

    def render(self, messages: list[Message], tools: tuple[dict[str, Any], ...] = (), *, prompt: bool = False) -> str:
        """The messages as text, with the generation prompt if `prompt`. Raises BadRow with the template's error."""
        return self._run(messages, tools, prompt, tracked=False)[0]

    def sequences(self, example: Example) -> list[Rendered]:
        """Training texts of one conversation, with every answer in exactly one of them. Raises BadRow.

        One text if the template writes each answer the same whether or not the conversation goes on. Else one more text for
        each answer that changes (for instance in templates that drop the thinking of earlier turns), so that each answer is
        trained after exactly the text that prompts it.
        """
        messages = list(example.messages)
        turns = tuple(index for index, message in enumerate(messages) if message["role"] == "assistant")
        if self.has_markers and example.answers == turns:
            text, spans = self._run(messages, example.tools, False, tracked=True)
            if not any(text[start:end].strip() for start, end in spans):
                raise BadRow("messages", "the chat template's {% generation %} marks no answer in this conversation")
            rendered = [Rendered(text, spans)]
        else:
            rendered = self._by_prefix(messages, example)
        _check_content(messages, example.answers, rendered)
        _check_calls(messages, example.answers, rendered)
        return rendered

    def whole(self, example: Example) -> Rendered:
        """One conversation as one text that is trained on as a whole. Raises BadRow."""
        messages = list(example.messages)
        text = self.render(messages, example.tools)
        rendered = Rendered(text, [(0, len(text))])
        _check_content(messages, example.answers, [rendered])
        _check_calls(messages, example.answers, [rendered])
        return rendered

    def _by_prefix(self, messages: list[Message], example: Example) -> list[Rendered]:
        """Training texts without markers: an answer is what its text adds to the prompt before it."""
        rendered = [Rendered(self.render(messages, example.tools), [])]
        for turn in reversed(example.answers):
            before = self.render(messages[:turn], example.tools, prompt=True)
            after = self.render(messages[: turn + 1], example.tools)
            start = _common(before, after)
            notes = set()
            if start < len(before):
                start = self._token_boundary(before, start)
                if start < len(self.render(messages[:turn], example.tools).rstrip()):
                    raise BadRow(
                        f"messages[{turn}]",
                        "the chat template changes earlier turns after this answer, so the answer can't be located; "
                        "set chat_template to a template with {% generation %} markers",
                    )
                notes.add("unprompted")
            if not after[start:].strip():
                raise BadRow(f"messages[{turn}]", "the chat template leaves this answer out")
            fits = ((one, end) for end in self._possible_ends(after) for one in rendered if one.text.startswith(after[:end]))
            host, end = next(fits, (None, len(after.rstrip())))
            if host is None:
                host = Rendered(after, [])
                rendered.append(host)
            host.spans.insert(0, (start, end))
            host.notes |= notes
        return sorted((one for one in rendered if one.spans), key=lambda one: len(one.text))

    def _token_boundary(self, text: str, place: int) -> int:
        """The last end of a token of `text` at or before `place`, so that the `<` of `<think>` isn't taken from an answer."""
        if not self.tokenizer.is_fast:
            return place
        offsets = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)["offset_mapping"]
        return max((end for _, end in offsets if end <= place), default=0)

    def _possible_ends(self, after: str) -> list[int]:
        """Where the answer at the end of `after` may end: there, or before a second EOS that only the last answer has."""
        whole = after.rstrip()
        for token in self.tokenizer.convert_ids_to_tokens(sorted(self.ends)):
            shorter = whole.removesuffix(token).rstrip()
            if shorter != whole and any(
                shorter.endswith(other) for other in self.tokenizer.convert_ids_to_tokens(sorted(self.ends))
            ):
                return [len(whole), len(shorter)]
        return [len(whole)]

    def _run(
        self, messages: list[Message], tools: tuple[dict[str, Any], ...], prompt: bool, *, tracked: bool
    ) -> tuple[str, list[Span]]:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if "developer" not in self.source:  # OpenAI's newer name for the system role; most templates would drop it
            messages = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
        messages = [_renamed(message, self._reasoning) for message in messages]
        if any(message.get("tool_calls") for message in messages):
            as_text, with_ids = self._call_form()
            messages = _in_form(messages, as_text=as_text, with_ids=with_ids)
        try:
            with _at_most(RENDER_S):
                rendered: Any = render_jinja_template(
                    conversations=[messages],
                    tools=list(tools) or None,
                    chat_template=self.source,
                    return_assistant_tokens_mask=tracked,
                    add_generation_prompt=prompt,
                    **self._values,
                )
        except TimeoutError:
            raise RecipeError(
                f"the chat template takes more than {RENDER_S:.0f} s for one row",
                "Set chat_template to the path of another template.",
            ) from None
        except (TemplateError, LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
            raise BadRow("messages", f"the chat template refuses it: {shown(str(error), 200)}") from None
        return rendered[0][0], [(start, end) for start, end in rendered[1][0]] if tracked else []

    def _call_form(self) -> tuple[bool, bool]:
        """Whether the template takes the arguments of a call as JSON text, and whether it needs ids; found by rendering one."""
        if self._calls_as is not None:
            return self._calls_as
        arguments = {"place": 'a "place"', "count": 3}
        call = {"type": "function", "function": {"name": "find_it", "arguments": arguments}}
        talk: list[Message] = [
            {"role": "user", "content": "a question"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "find_it", "content": "found"},
            {"role": "assistant", "content": "an answer"},
        ]
        for form in ((False, False), (True, False), (False, True), (True, True)):
            self._calls_as = form
            try:
                if is_written(self.render(talk), "find_it", arguments):
                    return form
            except BadRow:
                continue
        self._calls_as = (False, False)
        return self._calls_as

    def _after_an_answer(self, goes_on: bool) -> set[int]:
        """The special token that the template writes right after an answer, found by rendering one; empty if there is none."""
        answer = "the answer ends here"
        talk = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": answer}]
        try:
            text = self.render([*talk, {"role": "user", "content": "more"}] if goes_on else talk)
        except BadRow:
            return set()
        ids = self.tokenizer.encode(text.rpartition(answer)[2].lstrip(), add_special_tokens=False) if answer in text else []
        return {ids[0]} if ids and ids[0] in self.tokenizer.added_tokens_decoder else set()


def _source(tokenizer: PreTrainedTokenizerBase) -> str:
    """The template's text. Raises RecipeError when there is none or it isn't valid Jinja."""
    from jinja2.exceptions import TemplateSyntaxError

    try:
        source = tokenizer.get_chat_template()
    except ValueError:
        raise RecipeError(
            "the model's tokenizer has no chat template, and the rows are conversations",
            "Set chat_template to the path of a Jinja file, or to plain for a simple one (### User / ### Assistant);\n"
            "or train on rows of prompt and completion, or of text, which need no template.",
        ) from None
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        _refuse_bombs(source)
        render_jinja_template(conversations=[], chat_template=source)
    except TemplateSyntaxError as error:
        problem = f"the chat template is not valid Jinja: line {error.lineno}: {shown(error.message or '', 200)}"
        raise RecipeError(problem, "Correct it, or set chat_template to the path of another template.") from None
    return source


def _refuse_bombs(source: str) -> None:
    """Raises RecipeError for constant arithmetic that Jinja would compute while it compiles, where no time limit can end it."""
    from jinja2 import Environment, nodes

    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_ANY_MARKER.sub("", source))  # noqa: S701 - not rendered
    for node in tree.find_all((nodes.Pow, nodes.Mul)):
        numbers = [abs(part.value) for part in node.find_all(nodes.Const) if isinstance(part.value, (int, float))]
        if isinstance(node, nodes.Pow) or math.prod(numbers) > _LARGEST_PRODUCT:
            raise RecipeError(
                f"line {node.lineno} of the chat template multiplies to more than {_LARGEST_PRODUCT:,}",
                "Set chat_template to the path of another template.",
            )


class _at_most:  # noqa: N801 - used as a function
    """Raises TimeoutError in the block after `seconds`. Only in the main thread, which alone gets signals."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        self._is_set = False
        if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
            self._handler = signal.signal(signal.SIGALRM, _ring)
            self._left = signal.setitimer(signal.ITIMER_REAL, self._seconds)  # another timer, such as a test's, is restored
            self._is_set = True

    def __exit__(self, *_: object) -> None:
        if self._is_set:
            signal.setitimer(signal.ITIMER_REAL, *self._left)
            signal.signal(signal.SIGALRM, self._handler)


def _ring(_number: int, _frame: Any) -> None:
    raise TimeoutError


def _common(one: str, other: str) -> int:
    """Length of the common prefix."""
    if other.startswith(one):
        return len(one)
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _check_content(messages: list[Message], answers: tuple[int, ...], rendered: list[Rendered]) -> None:
    """Raises BadRow when an answer is not in the trained spans; notes other missing text. Ignores white space."""
    trained = "".join(one.text[start:end] for one in rendered for start, end in one.spans)
    for turn in answers:
        answer = messages[turn]["content"].split("</think>")[-1].strip().removeprefix("<think>").strip()
        if answer not in trained and _close(answer) not in _close(trained):
            raise BadRow(f"messages[{turn}]", "the chat template leaves this answer out or changes its text")
        reasoning = messages[turn].get("reasoning_content", "")
        if reasoning and _close(reasoning) not in _close(trained):
            raise BadRow(
                f"messages[{turn}].reasoning_content",
                "the chat template leaves out the reasoning; use a model whose template writes it, or leave it out on purpose: "
                "dataset.ignore_columns=[reasoning_content]",
            )
    texts = [one.text for one in rendered]
    for message in messages:
        text = message["content"].strip()
        if text not in texts[0] and not any(text in whole or _close(text) in _close(whole) for whole in texts):
            rendered[0].notes.add("altered")


def _check_calls(messages: list[Message], answers: tuple[int, ...], rendered: list[Rendered]) -> None:
    """Raises BadRow when a call of a tool is not in the text, or doesn't parse back to the same name and arguments."""
    if not any("tool_calls" in message for message in messages):
        return
    trained = "\n".join(one.text[start:end] for one in rendered for start, end in one.spans)
    for turn, message in enumerate(messages):
        text = trained if turn in answers else "\n".join(one.text for one in rendered)
        for call in message.get("tool_calls") or []:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if name not in text:
                raise BadRow(f"messages[{turn}]", f"the chat template leaves out its call of the tool {shown(name)}")
            if not is_written(text, name, arguments):
                raise BadRow(
                    f"messages[{turn}]",
                    f"the chat template changes its call of the tool {shown(name)}: it parses back to other arguments",
                )
            told = next((m["content"] for m in messages if m["role"] != "user" and "<tool_call>" in m["content"]), None)
            if told is not None and not re.search(r"<tool_call>\s*\{", text):
                raise BadRow(
                    "messages[0]", "tells the model to write <tool_call>, and its chat template writes calls in another form"
                )


def _renamed(message: Message, reasoning: str) -> Message:
    """The message with its reasoning under the name that the template reads."""
    if "reasoning_content" not in message or reasoning == "reasoning_content":
        return message
    return {reasoning if name == "reasoning_content" else name: value for name, value in message.items()}


def _in_form(messages: list[Message], *, as_text: bool, with_ids: bool) -> list[Message]:
    """The messages with their calls as the template takes them. New ids have nine characters, as Mistral's templates demand."""
    made, number, open_ids = [], 0, list[str]()
    for message in messages:
        if message.get("tool_calls"):
            calls, open_ids = [], []
            for call in message["tool_calls"]:
                function = call["function"]
                if as_text:
                    function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
                call = {**call, "function": function}
                if with_ids:
                    number += 1
                    call.setdefault("id", f"call{number:05d}")
                    open_ids.append(call["id"])
                calls.append(call)
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and open_ids:
            message = {"tool_call_id": open_ids.pop(0), **message}
        made.append(message)
    return made


def _close(text: str) -> str:
    return "".join(text.split())
