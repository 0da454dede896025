"""Render conversations, and locate the spans to train on."""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from finetune.data.chat_format import CallForm, ChatFormat, before_first, common_prefix_length, thought_and_text, without_space
from finetune.data.checks import BadRow, quoted
from finetune.data.conversation import THOUGHT_KEYS, Example, Message
from finetune.data.pictures.placement import PICTURE_MARK, text_pieces, with_parts
from finetune.data.report import printable
from finetune.data.tool_calls import Answer
from finetune.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
_SHORT_ID = re.compile("[A-Za-z0-9]{9}")  # the only form of ids that Mistral's templates take
_MARKER = re.compile(r"\{%[-+]?\s*(?:end)?generation\s*[-+]?%\}")
_MAX_PRODUCT = 1_000_000  # largest product of constants in a chat template; no template needs one
_MAX_CHARACTERS = 1_000_000  # most characters of a template; the longest known ones have 30,000
_ANOTHER_TEMPLATE = "Set chat_template to the path of another template."

#: Errors of a template's own code, beside Jinja's.
_CODE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError, MemoryError)
RENDER_S = 20.0  # time limit for rendering a conversation, in seconds; rendering usually takes a thousandth


@dataclass
class Rendered:
    """Text as the model sees it."""

    text: str
    spans: list[Span]  # the answers, as (start, end) in characters
    notes: set[str] = field(default_factory=set)  # for the report, names of `shards.FLAGS`
    turns: list[int] = field(default_factory=list)  # indices of the answers' messages
    escaped_spans: list[Span] = field(default_factory=list)  # special tokens in users' texts, to tokenise as text
    is_plain: bool = False  # without a template


def moved_spans(spans: Iterable[Span], replaced: Sequence[tuple[Span, int]]) -> list[Span]:
    """Return where spans are after replacements, given as (span before, length after)."""
    growths = [(end, length - (end - start)) for (start, end), length in replaced]

    def moved(position: int) -> int:
        return position + sum(growth for end, growth in growths if end <= position)

    return [(moved(start), moved(end)) for start, end in spans]


class Template:
    """A tokenizer's chat template, rendered only in transformers' sandbox."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.source = _template_source(tokenizer)
        self.has_markers = bool(re.search(r"\{%[-+]?\s*generation\b", self.source))
        self.writes_today = "strftime_now" in self.source and "date_string" not in self.source
        # the key under which the template reads a thought
        read_keys = [name for name in THOUGHT_KEYS if re.search(rf"[.\['\"]{name}\b", self.source)]
        self._thought_key = [*read_keys, *THOUGHT_KEYS][0]
        self._variables: dict[str, Any] = {**tokenizer.special_tokens_map}
        if "date_string" in self.source:
            # else Llama's templates write today's date; this is their own default
            self._variables["date_string"] = "26 Jul 2024"
        self.call_form = CallForm()  # ChatFormat sets it while it learns the format
        specials = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.special_tokens = sorted(specials | {name for name in tokenizer.all_special_tokens if isinstance(name, str)})
        self._with_thought: Callable[[Message], Message] = lambda message: message  # while the format is learned
        self.format = ChatFormat(self)
        self._with_thought = self.format.with_thought

    def render(
        self, messages: list[Message], tools: tuple[dict[str, Any], ...] = (), *, add_generation_prompt: bool = False
    ) -> str:
        """Return the messages as text. Raise BadRow with the template's error."""
        return self._render(messages, tools, add_generation_prompt, with_spans=False)[0]

    def sequences(self, example: Example, *, train_on_inputs: bool = False) -> list[Rendered]:
        """Return training texts with every answer in exactly one text. Raise BadRow."""
        messages = [self._with_thought(message) for message in example.messages]
        assistant_turns = tuple(index for index, message in enumerate(messages) if message["role"] == "assistant")
        if train_on_inputs:  # one text, all trained on
            text = self.render(messages, example.tools)
            for turn in example.answers:
                _require_written(messages[turn], f"messages[{turn}]", text)
            located = list[Rendered]()
            with contextlib.suppress(BadRow):  # answers needn't be located; only their notes are used
                located = self._sequences_by_prefix(messages, example)
            notes = set[str]()
            if located:
                notes.update(*(sequence.notes for sequence in self._read_back(messages, example, located)))
            return [Rendered(text, [(0, len(text))], notes)]
        if self.has_markers and example.answers == assistant_turns:  # a marker can't leave out an answer
            text, spans = self._render(messages, example.tools, False, with_spans=True)
            if not any(text[start:end].strip() for start, end in spans):
                raise BadRow("messages", "the chat template's {% generation %} marks no answer in this conversation")
            marked = [Rendered(text, spans, turns=list(assistant_turns))]
            with contextlib.suppress(BadRow):  # such as dropped thoughts of earlier turns, which texts by prefix have
                return self._read_back(messages, example, marked)
        # a template may drop the thinking of earlier turns: each answer that changes as the conversation continues gets a text,
        # so that every answer is trained on after exactly the text that prompts it
        return self._read_back(messages, example, self._sequences_by_prefix(messages, example))

    def _sequences_by_prefix(self, messages: list[Message], example: Example) -> list[Rendered]:
        sequences = [Rendered(self.render(messages, example.tools), [])]
        for turn in reversed(example.answers):
            # an answer is the text that it adds to the prompt
            with_answer = self.render(messages[: turn + 1], example.tools)
            is_greeting = "user" not in [message["role"] for message in messages[:turn]]  # the assistant speaks first
            prompt = "" if is_greeting else self.render(messages[:turn], example.tools, add_generation_prompt=True)
            start = self.format.header_end(with_answer) if is_greeting else common_prefix_length(prompt, with_answer)
            notes = set()
            if start < len(prompt):  # without the end of the generation prompt, such as an opened thought
                start = self.token_boundary(prompt, with_answer, start)
                if start < len(self.render(messages[:turn], example.tools).rstrip()):
                    raise BadRow(
                        f"messages[{turn}]",
                        "the chat template changes earlier turns after this answer, so the answer can't be located; "
                        "set chat_template to a template with {% generation %} markers",
                    )
                notes.add("unprompted")
            if not with_answer[start:].strip():
                raise BadRow(f"messages[{turn}]", "the chat template leaves this answer out")
            # train on the answer in a text of later answers that begins with this conversation, else in a new text
            ends = self._possible_ends(with_answer)
            matches = ((other, end) for end in ends for other in sequences if other.text.startswith(with_answer[:end]))
            sequence, end = next(matches, (None, len(with_answer.rstrip())))
            if sequence is None:
                sequence = Rendered(with_answer, [])
                sequences.append(sequence)
            sequence.spans.insert(0, (start, end))
            sequence.turns.insert(0, turn)
            sequence.notes |= notes
        return sorted((sequence for sequence in sequences if sequence.spans), key=lambda sequence: len(sequence.text))

    def token_boundary(self, prompt: str, text: str, position: int) -> int:
        """Return the last token boundary of both texts up to `position`."""
        if not self.tokenizer.is_fast:
            return position
        both = self.tokenizer([prompt, text], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        # texts that go on with <think> and <tool_call> share the `<`, which is only a part of a token
        prompt_ends, text_ends = ({end for _, end in offsets if end <= position} for offsets in both["offset_mapping"])
        return max(prompt_ends & text_ends, default=0)

    def _possible_ends(self, text: str) -> list[int]:
        full_text, end_tokens = text.rstrip(), tuple(self.tokenizer.convert_ids_to_tokens(sorted(self.format.ends)))
        for token in end_tokens:  # some templates write a second EOS after the last answer only
            without_end = full_text.removesuffix(token).rstrip()
            if without_end != full_text and without_end.endswith(end_tokens):
                return [len(full_text), len(without_end)]
        return [len(full_text)]

    def _render(
        self, messages: list[Message], tools: tuple[dict[str, Any], ...], add_generation_prompt: bool, *, with_spans: bool
    ) -> tuple[str, list[Span]]:
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if "developer" not in self.source:  # OpenAI's newer name for the system role; most templates would drop it
            messages = [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]
        template_keys = {"reasoning_content": self._thought_key}
        messages = with_parts([
            {template_keys.get(key, key): value for key, value in self._with_thought(message).items()} for message in messages
        ])  # fmt: skip
        if any(message.get("tool_calls") for message in messages):
            messages = _with_call_form(messages, self.call_form)
        try:
            with _time_limit(RENDER_S):
                rendered: Any = render_jinja_template(
                    conversations=[messages],
                    tools=list(tools) or None,
                    chat_template=self.source,
                    return_assistant_tokens_mask=with_spans,
                    add_generation_prompt=add_generation_prompt,
                    **self._variables,
                )
        except TimeoutError:
            raise RecipeError(f"the chat template takes more than {RENDER_S:.0f} s for one row", _ANOTHER_TEMPLATE) from None
        except (TemplateError, *_CODE_ERRORS) as error:
            raise BadRow("messages", f"the chat template refuses it: {printable(str(error), 200)}") from None
        return rendered[0][0], [(start, end) for start, end in rendered[1][0]] if with_spans else []

    @cached_property
    def reads_pictures(self) -> bool:
        question = "a question"
        try:
            text, with_picture = (
                self.render([{"role": "user", "content": f"{mark}{question}", "pictures": len(mark)}])
                for mark in ("", PICTURE_MARK)
            )
        except BadRow:
            return False
        # templates of text alone ignore the image, fail, or print the content part
        return with_picture != text and question in with_picture and not re.search(r"""['"]type['"]""", with_picture)

    def _read_back(self, messages: list[Message], example: Example, sequences: list[Rendered]) -> list[Rendered]:
        """Read answers back as evaluation does. Raise BadRow for a different answer."""
        for sequence in sequences:
            if len(sequence.spans) != len(sequence.turns):
                raise BadRow("messages", "the chat template's {% generation %} marks parts of answers")
            for turn, (start, end) in zip(sequence.turns, sequence.spans, strict=True):
                message, text, path = messages[turn], sequence.text[start:end], f"messages[{turn}]"
                _require_written(message, path, text)
                if not any(token in str(message) for token in self.format.stop_tokens):  # else a note says so
                    text = before_first(self.format.stop_tokens, text)  # where generation ends
                tools = example.tools if example.tools or message.get("tool_calls") else None
                sequence.notes |= self._change_notes(message, self.format.read(text, tools), path)
        if self.format.writes_thought[False] and not any(thought_and_text(messages[turn])[0] for turn in example.answers):
            sequences[0].notes.add("unthinking")
        # a text or a thought that no sequence has; white space does not count
        texts = (piece for message in messages for piece in (*text_pieces(message), message.get("reasoning_content", "")))
        if not all(any(_contains(sequence.text, text) for sequence in sequences) for text in texts):
            sequences[0].notes.add("altered")
        has_calls = any(message.get("tool_calls") for message in messages)
        # rows for Hermes ask for <tool_call>{...}</tool_call> in their system prompt
        asks_for_tags = any("<tool_call>" in message["content"] for message in messages if message["role"] != "user")
        writes_json = any(re.search(r"<tool_call>\s*\{", sequence.text) for sequence in sequences)
        if has_calls and asks_for_tags and not writes_json:
            problem = "tells the model to write <tool_call>, and its chat template writes calls in another form"
            raise BadRow("messages[0]", problem)
        return sequences

    def _change_notes(self, message: Message, answer: Answer, path: str) -> set[str]:
        """Return notes on harmless changes. Raise BadRow for another answer."""
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        calls_read = [call["function"] for call in answer.calls]
        if calls_read and not calls:
            raise BadRow(path, "is read back as a tool call, which a program would run")
        # True == 1, and their texts differ
        if calls != calls_read or json.dumps(calls, sort_keys=True) != json.dumps(calls_read, sort_keys=True):
            problem = f"the chat template changes its call of tool {printable(calls[0]['name'])}"
            raise BadRow(path, f"{problem}: it parses back to other arguments")
        thought, text = (self.format.without_special_tokens(part) for part in thought_and_text(message))
        if (thought, text) == (answer.thought, answer.text):
            return set()
        expected, read = ([*map(without_space, pair)] for pair in ((thought, text), (answer.thought, answer.text)))
        if expected == read:
            return {"trimmed"} if not calls and text != answer.text else set()
        if not calls or "".join(expected) != "".join(read):
            after_thought = f", after the thought {quoted(answer.thought)}" if answer.thought else ""
            raise BadRow(path, f"is read back from its training text as {quoted(answer.text)}{after_thought}")
        return {"altered"}  # the text before a call is written as a thought


def _template_source(tokenizer: PreTrainedTokenizerBase) -> str:
    from jinja2.exceptions import TemplateSyntaxError

    try:
        source = tokenizer.get_chat_template()
    except ValueError:
        raise RecipeError(
            "the model's tokenizer has no chat template, and the rows are conversations",
            "Set chat_template to the path of a Jinja file, or to plain for a simple one (### User / ### Assistant);\n"
            "or train on rows of prompt and completion, or of text, which need no template.",
        ) from None
    if len(source) > _MAX_CHARACTERS:
        problem = f"the chat template has {len(source):,} characters, more than {_MAX_CHARACTERS:,}"
        raise RecipeError(problem, _ANOTHER_TEMPLATE)
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        _check_constants(source)
        render_jinja_template(conversations=[], chat_template=source)
    except TemplateSyntaxError as error:
        problem = f"the chat template is not valid Jinja: line {error.lineno}: {printable(error.message or '', 200)}"
        raise RecipeError(problem, "Correct it, or set chat_template to the path of another template.") from None
    except (RecursionError, MemoryError):
        raise RecipeError("the chat template is nested too deeply", _ANOTHER_TEMPLATE) from None
    return source


def _check_constants(source: str) -> None:
    from jinja2 import Environment, nodes

    # Jinja computes constants while it compiles, which no time limit can stop
    tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_MARKER.sub("", source))  # noqa: S701 - not rendered
    for node in tree.find_all((nodes.Pow, nodes.Mul)):
        numbers = [abs(child.value) for child in node.find_all(nodes.Const) if isinstance(child.value, (int, float))]
        if isinstance(node, nodes.Pow) or math.prod(numbers) > _MAX_PRODUCT:  # no template needs a power
            raise RecipeError(
                f"line {node.lineno} of the chat template multiplies to more than {_MAX_PRODUCT:,}", _ANOTHER_TEMPLATE
            )


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    # only the main thread gets signals
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    previous_handler = signal.signal(signal.SIGALRM, _raise_timeout)
    previous_timer = signal.setitimer(signal.ITIMER_REAL, seconds)  # another timer, such as a test's, is restored
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
        signal.signal(signal.SIGALRM, previous_handler)


def _raise_timeout(_number: int, _frame: Any) -> None:
    raise TimeoutError


def _require_written(message: Message, path: str, trained_text: str) -> None:
    thought, text = thought_and_text(message)
    if not _contains(trained_text, text):
        raise BadRow(path, "the chat template leaves this answer out or changes its text")
    for call in message.get("tool_calls") or ():
        if call["function"]["name"] not in trained_text:
            raise BadRow(path, f"the chat template leaves out its call of tool {printable(call['function']['name'])}")
    if not _contains(trained_text, thought):
        has_field = "reasoning_content" in message
        other_fix = "leave it out: dataset.ignore_columns=[reasoning_content]" if has_field else "take it out of the rows"
        raise BadRow(
            f"{path}.reasoning_content" if has_field else path,
            f"the chat template leaves out the reasoning; use a model whose template writes it, or {other_fix}",
        )


def _with_call_form(messages: list[Message], form: CallForm) -> list[Message]:
    # write ids and arguments of calls as the template takes them; a tool's reply without an id answers the oldest open call
    converted, unanswered_ids = [], list[str]()
    template_ids: dict[str, str] = {}  # by the id in the row
    call_count = 0
    for message in messages:
        if message.get("tool_calls"):
            calls, unanswered_ids = [], []
            for call in message["tool_calls"]:
                function = call["function"]
                if form.as_text:
                    function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
                call = {**call, "function": function}
                if form.ids:
                    call_count += 1
                    new_id = f"call{call_count:05d}"  # nine characters, as `_SHORT_ID`
                    own_id = call.get("id") or new_id
                    is_accepted = form.ids == "own" or _SHORT_ID.fullmatch(own_id)
                    call["id"] = template_ids[own_id] = own_id if is_accepted else new_id
                    unanswered_ids.append(call["id"])
                calls.append(call)
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool" and (unanswered_ids or message.get("tool_call_id") in template_ids):
            call_id = template_ids.get(message.get("tool_call_id", "")) or unanswered_ids[0]
            message = {**message, "tool_call_id": call_id}
            unanswered_ids = [other for other in unanswered_ids if other != call_id]
        converted.append(message)
    return converted


def _contains(text: str, part: str) -> bool:
    return part in text or without_space(part) in without_space(text)
