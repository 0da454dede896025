"""An Ollama Modelfile with the chat template of the training, for templates that are proven to be the same in its language."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

from finetune.data.checks import BadRow
from finetune.data.conversation import Message

#: (messages, whether the generation prompt follows) -> text. Raises BadRow where the template refuses them.
Render = Callable[[list[Message], bool], str]

_SYSTEM, _USER, _ANSWER, _SECOND = "9systemwords9", "9userwords9", "9answerwords9", "9secondwords9"


class NotProven(Exception):
    """Why a template is not written for Ollama."""


@dataclass(frozen=True)
class RoleForm:
    """A template that writes each message between two texts of its role.

    `around`: (before, after) of each role. `without_system`: what is written first when no system message is first.
    """

    around: dict[str, tuple[str, str]]
    without_system: str
    generation_prompt: str

    def text(self, messages: list[Message]) -> str:
        """The conversation with the generation prompt."""
        written = "" if messages[0]["role"] == "system" else self.without_system
        for message in messages:
            before, after = self.around[message["role"]]
            written += before + message["content"] + after
        return written + self.generation_prompt

    def as_go(self) -> str:
        """The same in the language of Ollama: https://docs.ollama.com/modelfile#template"""
        first = '{{ if ne (index .Messages 0).Role "system" }}' + self.without_system + "{{ end }}"
        branches = [
            f'{{{{ {"if" if place == 0 else "else if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for place, (role, (before, after)) in enumerate(self.around.items())
        ]
        loop = "{{ range .Messages }}" + "".join(branches) + "{{ end }}{{ end }}"
        return (first if self.without_system else "") + loop + self.generation_prompt


def role_form(render: Render, *, bos: str = "", writes_today: bool = False) -> RoleForm:
    """The form of a chat template, proven on conversations. `bos` is the text that the program that reads it adds by itself.

    Raises NotProven with the reason.
    """
    if writes_today:
        raise NotProven("it writes today's date")

    def shown(messages: list[Message], prompt: bool) -> str:
        text = render(messages, prompt)
        if not text.startswith(bos):
            raise NotProven(f"it does not begin with {bos}, which the file asks for")
        return text.removeprefix(bos)

    form = _guess(shown)
    for messages in conversations("system" in form.around):
        try:
            expected = shown(messages, True)
        except BadRow:
            continue
        if form.text(messages) != expected:
            raise NotProven(f"it writes {len(messages)} messages in another way than one by one")
    for text in (*(part for pair in form.around.values() for part in pair), form.without_system, form.generation_prompt):
        if "{{" in text or '"""' in text:
            raise NotProven("its texts have braces that Ollama's language would read")
    return form


def conversations(with_system: bool) -> list[list[Message]]:
    """Conversations that a template may treat differently: their length, a system message, what they contain."""
    contents = ("Hello", "Two\nlines\n\nand more", "Ünïcödé 你好 🙂", '{"a": [1, 2]}', "# a <b> & 'c'", "x")
    made: list[list[Message]] = []
    for content, turns, system in product(contents, (0, 1, 2), (False, True) if with_system else (False,)):
        messages: list[Message] = [{"role": "system", "content": f"Be kind.\n{content}"}] if system else []
        for turn in range(turns):
            messages += [
                {"role": "user", "content": f"{content} {turn}"},
                {"role": "assistant", "content": f"{turn} {content}"},
            ]
        made.append([*messages, {"role": "user", "content": content}])
    return made


def _guess(render: Render) -> RoleForm:
    """The texts around each role, cut out of a few conversations."""
    user: Message = {"role": "user", "content": _USER}
    answer: Message = {"role": "assistant", "content": _ANSWER}
    second: Message = {"role": "user", "content": _SECOND}
    first, after_user = _cut(render([user], False), _USER)
    generation_prompt = _without(render([user], True), first + _USER + after_user)
    _, after_answer = _cut(render([user, answer], False), _ANSWER)
    turns = render([user, answer, second], False)
    before_answer = _without(_cut(_cut(turns, _USER)[1], _ANSWER)[0], after_user)
    before_user = _without(_cut(_cut(turns, _ANSWER)[1], _SECOND)[0], after_answer)
    if not first.endswith(before_user):
        raise NotProven("it writes the first message in another way than later ones")
    around = {"user": (before_user, after_user), "assistant": (before_answer, after_answer)}
    try:
        before_system, rest = _cut(render([{"role": "system", "content": _SYSTEM}, user], False), _SYSTEM)
    except BadRow:
        return RoleForm(around, first.removesuffix(before_user), generation_prompt)
    between = _cut(rest, _USER)[0]
    if not between.endswith(before_user):
        raise NotProven("it writes a message after a system message in another way")
    around = {"system": (before_system, between.removesuffix(before_user)), **around}
    return RoleForm(around, first.removesuffix(before_user), generation_prompt)


def _cut(text: str, at: str) -> tuple[str, str]:
    before, found, after = text.partition(at)
    if not found:
        raise NotProven("it leaves out a message or changes it")
    return before, after


def _without(text: str, beginning: str) -> str:
    if not text.startswith(beginning):
        raise NotProven("it writes a message differently when another follows")
    return text.removeprefix(beginning)


def modelfile(model: str, form: RoleForm, stops: list[str], adapter: str | None = None) -> str:
    """The Modelfile for the GGUF files beside it."""
    lines = [f"FROM ./{model}", *([f"ADAPTER ./{adapter}"] if adapter else []), f'TEMPLATE """{form.as_go()}"""']
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if stop.strip() and '"' not in stop]
    return "\n".join([*lines, ""])
