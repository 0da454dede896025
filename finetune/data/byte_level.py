"""Where the tokens of a byte-level tokenizer are in a text, from their own lengths.

Each of their tokens stands for a number of bytes that its name tells, so that offsets need not be tracked while tokenising,
which takes a third of the time. The bytes of all tokens are compared with the text's: where they differ, nothing is said.
"""

from __future__ import annotations

import json
import unicodedata
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: The character that stands for a space in the names of tokens.
_SPACE = "\u0120"


class ByteLevel:
    """The lengths of a tokenizer's tokens. Made by `of`."""

    def __init__(self, backend: Any, lengths: np.ndarray, trimmed: np.ndarray | None, *, normalises: bool) -> None:
        """`lengths` in bytes by id; `trimmed`: spaces before and after that the tokenizer's offsets leave out."""
        self._backend, self._lengths, self._normalises = backend, lengths, normalises
        self._trims = trimmed is not None
        self._before: np.ndarray = lengths if trimmed is None else trimmed[0]
        self._after: np.ndarray = lengths if trimmed is None else trimmed[1]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ByteLevel | None:
        """For a byte-level tokenizer that changes no text but by NFC and adds no space in front; None for any other."""
        from tokenizers import pre_tokenizers

        if not tokenizer.is_fast:
            return None
        backend: Any = tokenizer.backend_tokenizer
        rules = json.loads(backend.to_str())
        normalizer = (rules.get("normalizer") or {}).get("type")
        steps = _steps(rules.get("pre_tokenizer"), "ByteLevel")
        if rules["model"]["type"] != "BPE" or normalizer not in (None, "NFC") or not steps:
            return None
        if any(step.get("add_prefix_space") for step in steps):
            return None
        trims = any(step.get("trim_offsets") for step in _steps(rules.get("post_processor"), "ByteLevel"))
        vocabulary, alphabet = tokenizer.get_vocab(), set(pre_tokenizers.ByteLevel.alphabet())
        lengths, before, after = np.zeros((3, max(vocabulary.values()) + 1), dtype=np.int32)
        added = tokenizer.added_tokens_decoder
        for token, number in vocabulary.items():
            if number in added:
                if token != token.strip():
                    return None
                lengths[number] = len(token.encode())
                continue
            if not alphabet.issuperset(token):
                return None
            lengths[number] = len(token)
            if trims:  # as `trim_offsets` does: first at the start, then what is left at the end
                before[number] = len(token) - len(token.lstrip(_SPACE))
                after[number] = len(token) - len(token.rstrip(_SPACE)) if before[number] < len(token) else 0
        return cls(backend, lengths, np.stack([before, after]) if trims else None, normalises=normalizer is not None)

    def ids(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text, special ones read as such and none added."""
        if self._backend.padding is not None or self._backend.truncation is not None:
            self._backend.no_padding()
            self._backend.no_truncation()
        if self._backend.encode_special_tokens:
            self._backend.encode_special_tokens = False
        return [one.ids for one in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def trained(self, ids: list[int], text: str, spans: list[tuple[int, int]]) -> np.ndarray | None:
        """Whether each token overlaps one of the spans, as `overlapping` says of the tokenizer's own offsets.

        None where the tokens don't add up to the text.
        """
        if self._normalises and not unicodedata.is_normalized("NFC", text):
            return None
        plain = text.isascii()
        tokens = np.frombuffer(array("i", ids), dtype=np.int32)
        ends = self._lengths[tokens].cumsum()
        if not len(ends) or ends[-1] != (len(text) if plain else len(text.encode())):
            return None
        if not plain:
            spans = [(len(text[:start].encode()), len(text[:end].encode())) for start, end in spans]
        if self._trims:
            starts = ends - self._lengths[tokens] + self._before[tokens]
            return overlapping(np.stack([starts, ends - self._after[tokens]], axis=1), spans)
        trained = np.zeros(len(ends), dtype=bool)
        for start, end in spans:
            trained[ends.searchsorted(start, "right") : ends.searchsorted(end, "left") + 1] = True
        return trained


def overlapping(offsets: list[tuple[int, int]] | np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """Whether each token overlaps a span.

    Offsets may omit white space at a token's start, or be empty for a token of white space; such a token is taken to start at
    the end of the one before.
    """
    start, end = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    before = np.append(0, np.maximum.accumulate(end)[:-1]) if len(end) else end
    first = np.where(start < end, start, before)
    trained = np.zeros(len(end), dtype=bool)
    for begin, stop in spans:
        trained |= (first < stop) & (end > begin)
    return trained


def _steps(part: Any, kind: str) -> list[dict[str, Any]]:
    """The steps of one kind in a part of tokenizer.json, which may be a sequence."""
    if not isinstance(part, dict):
        return []
    inner = part.get("pretokenizers") or part.get("processors") or []
    return [part] if part.get("type") == kind else [found for step in inner for found in _steps(step, kind)]
