"""Keep special tokens in users' texts as text, so that no row can end or open a turn."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from finetune.data.checks import BadRow, quoted
from finetune.data.conversation import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data.template import Rendered, Span

#: First of the placeholders for special tokens while the chat template is rendered: the end of Unicode's private use area.
_FIRST_PLACEHOLDER = 0x10E000
#: Roles whose texts are escaped; a system prompt and the answers may have special tokens, such as <think>.
_ESCAPED_ROLES = ("user", "tool")


def _placeholder(index: int) -> str:
    return chr(_FIRST_PLACEHOLDER + index)


class SpecialTokenEscaper:
    """Escapes special tokens in users' texts while a template is rendered."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added_tokens = {str(token): token for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._special_tokens = sorted({*added_tokens, *map(str, tokenizer.all_special_tokens)} - {""}, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, self._special_tokens)) or "(?!)")
        self._placeholder_pattern = re.compile(f"[{_placeholder(0)}-{_placeholder(len(self._special_tokens))}]")
        patterns = []
        for index, name in enumerate(self._special_tokens):
            left_spaces, right_spaces = (
                r"\s*" if getattr(added_tokens.get(name), strip_side, False) else "" for strip_side in ("lstrip", "rstrip")
            )
            patterns.append(f"{left_spaces}(?P<t{index}>{re.escape(name)}){right_spaces}")
        self._token_pattern = re.compile("|".join(patterns) or "(?!)")

    def contains_special(self, text: str) -> bool:
        return self._special_pattern.search(text) is not None

    def escape(self, messages: list[Message]) -> list[Message]:
        """Put placeholders for special tokens in users' texts. Raise BadRow."""
        return [self._escape_message(message, f"messages[{index}].content") for index, message in enumerate(messages)]

    def _escape_message(self, message: Message, path: str) -> Message:
        match = self._special_pattern.search(message["content"]) if message["role"] in _ESCAPED_ROLES else None
        if match is None:
            return message
        if not self._can_split() or self._placeholder_pattern.search(message["content"]):
            raise BadRow(path, f"has {quoted(match[0])}, a special token of the model; remove it or rewrite it")
        text = self._special_pattern.sub(lambda token: _placeholder(self._special_tokens.index(token[0])), message["content"])
        return {**message, "content": text}

    def unescape(self, rendered: Rendered) -> Rendered:
        """Put special tokens back in place of placeholders, as `escaped_spans`."""
        matches = self._placeholder_pattern.finditer(rendered.text)
        replacements = [(match.start(), self._token_of(match)) for match in matches]
        if not replacements:
            return rendered

        def shifted(position: int) -> int:
            return position + sum(len(name) - 1 for offset, name in replacements if offset < position)

        text = self._placeholder_pattern.sub(self._token_of, rendered.text)
        spans = [(shifted(start), shifted(end)) for start, end in rendered.spans]
        escaped_spans = [(shifted(offset), shifted(offset) + len(name)) for offset, name in replacements]
        return replace(rendered, text=text, spans=spans, escaped_spans=escaped_spans)

    def _token_of(self, placeholder: re.Match[str]) -> str:
        return self._special_tokens[ord(placeholder[0]) - _FIRST_PLACEHOLDER]

    def tokenise(self, text: str, escaped_spans: list[Span]) -> tuple[list[int], list[Span]]:
        """Return ids and character spans, with `escaped_spans` tokenised as text."""
        ids: list[int] = []
        offsets: list[Span] = []
        for start, end, token in self._split_at_special(text, escaped_spans):
            if token is not None:
                ids += list(self._tokenizer.convert_tokens_to_ids([token]))  # type: ignore[arg-type]
                offsets.append((start, end))
            elif start < end:
                piece = self._tokenizer(
                    text[start:end],
                    add_special_tokens=False,
                    split_special_tokens=True,
                    return_offsets_mapping=True,
                    verbose=False,
                )
                ids += piece["input_ids"]
                offsets += [(start + token_start, start + token_end) for token_start, token_end in piece["offset_mapping"]]
        return ids, offsets

    def _split_at_special(self, text: str, escaped_spans: list[Span]) -> Iterator[tuple[int, int, str | None]]:
        previous_end = 0
        for match in self._token_pattern.finditer(text):
            group = match.lastgroup or ""
            if any(start <= match.start(group) < end for start, end in escaped_spans):
                continue
            # None: text between special tokens
            yield previous_end, match.start(), None
            yield match.start(), match.end(), match[group]
            previous_end = match.end()
        yield previous_end, len(text), None

    def _can_split(self) -> bool:
        if not self._tokenizer.is_fast:
            return False
        backend = self._tokenizer.backend_tokenizer
        # a space at the start of a piece would change its tokens
        rules = f"{backend.normalizer} {backend.pre_tokenizer}"
        return not any(word in rules for word in ("Prepend", "Metaspace", "add_prefix_space=True"))
