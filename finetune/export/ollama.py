"""Write an Ollama Modelfile for templates that its language can express."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

from finetune.data.checks import BadRow
from finetune.data.conversation import Message

#: (messages, whether the generation prompt follows) -> text. Raises BadRow if the template refuses them.
Render = Callable[[list[Message], bool], str]

#: Contents that show where a template writes each message.
_SYSTEM, _USER, _ANSWER, _SECOND = "9systemwords9", "9userwords9", "9answerwords9", "9secondwords9"


class TemplateUnsupported(Exception):
    """Why a template can't be written for Ollama."""


@dataclass(frozen=True)
class RoleForm:
    """A template that writes each message between two texts of its role."""

    around: dict[str, tuple[str, str]]  # texts before and after the content, by role
    without_system: str  # text at the start of a conversation without a system message
    generation_prompt: str

    def text(self, messages: list[Message]) -> str:
        text = "" if messages[0]["role"] == "system" else self.without_system
        for message in messages:
            before, after = self.around[message["role"]]
            text += before + message["content"] + after
        return text + self.generation_prompt

    def as_go(self) -> str:
        # Ollama's template language: https://docs.ollama.com/modelfile#template
        opening = '{{ if ne (index .Messages 0).Role "system" }}' + self.without_system + "{{ end }}"
        branches = "{{ else ".join(
            f'if eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}' for role, (before, after) in self.around.items()
        )
        loop = "{{ range .Messages }}{{ " + branches + "{{ end }}{{ end }}"
        return (opening if self.without_system else "") + loop + self.generation_prompt


def role_form(render: Render, *, bos: str = "", writes_today: bool = False) -> RoleForm:
    """Infer and check the form of a chat template. Raise TemplateUnsupported."""
    if writes_today:
        raise TemplateUnsupported("it writes today's date")

    def render_without_bos(messages: list[Message], prompt: bool) -> str:
        text = render(messages, prompt)
        if not text.startswith(bos):  # llama.cpp and Ollama add `bos`
            raise TemplateUnsupported(f"it does not begin with {bos}, which the file asks for")
        return text.removeprefix(bos)

    form = _infer_form(render_without_bos)
    for messages in conversations("system" in form.around):
        try:
            expected = render_without_bos(messages, True)
        except BadRow:
            continue
        if form.text(messages) != expected:
            raise TemplateUnsupported(f"it writes {len(messages)} messages differently together than one by one")
    for text in (*itertools.chain(*form.around.values()), form.without_system, form.generation_prompt):
        if "{{" in text or '"""' in text:
            raise TemplateUnsupported("its texts contain braces that Ollama's template language would interpret")
    return form


def conversations(with_system: bool) -> list[list[Message]]:
    """Return conversations that templates may render in different ways."""
    contents = ("Hello", "Two\nlines\n\nand more", "Ünïcödé 你好 🙂", '{"a": [1, 2]}', "# a <b> & 'c'", "x")
    variants: list[list[Message]] = []
    for content, turns, system in itertools.product(contents, (0, 1, 2), (False, True) if with_system else (False,)):
        messages: list[Message] = [{"role": "system", "content": f"Be kind.\n{content}"}] if system else []
        for turn in range(turns):
            messages += [
                {"role": "user", "content": f"{content} {turn}"},
                {"role": "assistant", "content": f"{turn} {content}"},
            ]
        variants.append([*messages, {"role": "user", "content": content}])
    return variants


def _infer_form(render: Render) -> RoleForm:
    # splits short conversations at their contents: the texts between are those that the template writes around each role
    user: Message = {"role": "user", "content": _USER}
    answer: Message = {"role": "assistant", "content": _ANSWER}
    second: Message = {"role": "user", "content": _SECOND}
    opening, after_user = _split_at(render([user], False), _USER)
    generation_prompt = _remove_prefix(render([user], True), opening + _USER + after_user)
    _, after_answer = _split_at(render([user, answer], False), _ANSWER)
    turns = render([user, answer, second], False)
    before_answer = _remove_prefix(_split_at(_split_at(turns, _USER)[1], _ANSWER)[0], after_user)
    before_user = _remove_prefix(_split_at(_split_at(turns, _ANSWER)[1], _SECOND)[0], after_answer)
    if not opening.endswith(before_user):
        raise TemplateUnsupported("it writes the first message differently from later messages")
    around = {"user": (before_user, after_user), "assistant": (before_answer, after_answer)}
    try:
        before_system, after_system_text = _split_at(render([{"role": "system", "content": _SYSTEM}, user], False), _SYSTEM)
    except BadRow:
        return RoleForm(around, opening.removesuffix(before_user), generation_prompt)
    between = _split_at(after_system_text, _USER)[0]
    if not between.endswith(before_user):
        raise TemplateUnsupported("it writes the message after a system message differently")
    around = {"system": (before_system, between.removesuffix(before_user)), **around}
    return RoleForm(around, opening.removesuffix(before_user), generation_prompt)


def _split_at(text: str, separator: str) -> tuple[str, str]:
    before, match, after = text.partition(separator)
    if not match:
        raise TemplateUnsupported("it leaves out a message or changes it")
    return before, after


def _remove_prefix(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise TemplateUnsupported("it writes a message differently when another follows")
    return text.removeprefix(prefix)


def modelfile(model: str, form: RoleForm, stops: list[str], adapter: str | None = None) -> str:
    """Return the Modelfile for GGUF files beside it."""
    lines = [f"FROM ./{model}"]
    if adapter:
        lines.append(f"ADAPTER ./{adapter}")
    lines.append(f'TEMPLATE """{form.as_go()}"""')
    lines += [f'PARAMETER stop "{stop}"' for stop in stops if stop.strip() and '"' not in stop]
    return "\n".join([*lines, ""])
