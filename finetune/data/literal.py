"""Special tokens that a user's text contains stay text: no row can end a turn or open another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from finetune.data.checks import BadRow, quoted
from finetune.data.conversation import Message
from finetune.data.template import Rendered, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Characters that stand for special tokens while the chat template writes a conversation: the end of Unicode's private use.
_FIRST = 0x10E000
#: Whose text can't have special tokens; a system prompt and the answers may, such as <think>.
_ROLES = ("user", "tool")


class Literal:
    """Hides special tokens in users' texts from a tokenizer, and tokenises them as text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added = {str(token): token for token in tokenizer.added_tokens_decoder.values() if token.special}
        self._names = sorted({*added, *map(str, tokenizer.all_special_tokens)} - {""}, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, self._names)) or "(?!)")
        self._marks = re.compile(f"[{chr(_FIRST)}-{chr(_FIRST + len(self._names))}]")
        patterns = []
        for number, name in enumerate(self._names):
            before, after = (
                (r"\s*" if token.lstrip else "", r"\s*" if token.rstrip else "") if (token := added.get(name)) else ("", "")
            )
            patterns.append(f"{before}(?P<t{number}>{re.escape(name)}){after}")
        self._token = re.compile("|".join(patterns) or "(?!)")

    def found_in(self, text: str) -> bool:
        """Whether a text contains special tokens."""
        return self._any.search(text) is not None

    def hidden(self, messages: list[Message]) -> list[Message]:
        """The messages with other characters for the special tokens in users' texts. Raises BadRow where that can't be done."""
        return [self._hidden(message, f"messages[{index}].content") for index, message in enumerate(messages)]

    def _hidden(self, message: Message, where: str) -> Message:
        found = self._any.search(message["content"]) if message["role"] in _ROLES else None
        if found is None:
            return message
        if not self._in_pieces() or self._marks.search(message["content"]):
            raise BadRow(where, f"has {quoted(found[0])}, a special token of the model; remove it, or write it in another way")
        text = self._any.sub(lambda one: chr(_FIRST + self._names.index(one[0])), message["content"])
        return {**message, "content": text}

    def shown(self, one: Rendered) -> Rendered:
        """The rendered text with the special tokens back in it, as spans that stay text."""
        places = [(found.start(), self._names[ord(found[0]) - _FIRST]) for found in self._marks.finditer(one.text)]
        if not places:
            return one

        def moved(place: int) -> int:
            return place + sum(len(name) - 1 for at, name in places if at < place)

        text = self._marks.sub(lambda found: self._names[ord(found[0]) - _FIRST], one.text)
        literal = [(moved(at), moved(at) + len(name)) for at, name in places]
        return replace(one, text=text, spans=[(moved(a), moved(b)) for a, b in one.spans], literal=literal)

    def ids(self, text: str, literal: list[Span]) -> tuple[list[int], list[Span]]:
        """Ids and the character span of each token, with the special tokens in `literal` as text."""
        ids: list[int] = []
        offsets: list[Span] = []
        for start, end, token in self._pieces(text, literal):
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
                offsets += [(start + a, start + b) for a, b in piece["offset_mapping"]]
        return ids, offsets

    def _pieces(self, text: str, literal: list[Span]) -> Iterator[tuple[int, int, str | None]]:
        """The real special tokens of a text, and what is between them."""
        last = 0
        for found in self._token.finditer(text):
            name = found.lastgroup or ""
            if any(start <= found.start(name) < end for start, end in literal):
                continue
            yield last, found.start(), None
            yield found.start(), found.end(), found[name]
            last = found.end()
        yield last, len(text), None

    def _in_pieces(self) -> bool:
        """Whether this tokenizer gives a text in pieces the same tokens as a whole: it adds no space at the start of one."""
        if not self._tokenizer.is_fast:
            return False
        backend = self._tokenizer.backend_tokenizer
        rules = f"{backend.normalizer} {backend.pre_tokenizer}"
        return not any(word in rules for word in ("Prepend", "Metaspace", "add_prefix_space=True"))
