"""Compute token offsets of a byte-level tokenizer from token lengths."""

from __future__ import annotations

import json
import unicodedata
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPACE = "\u0120"  # the character for a space in token names


class ByteLevel:
    """Byte lengths of a tokenizer's tokens, built by `of`."""

    def __init__(self, backend: Any, lengths: np.ndarray, trimmed: np.ndarray | None, *, normalises: bool) -> None:
        self._backend, self._normalises = backend, normalises
        self._lengths = lengths  # in bytes, by id
        self._trimmed = trimmed  # by id, the leading and the trailing spaces that the tokenizer's offsets leave out

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> ByteLevel | None:
        """Build token lengths; None unless the tokenizer is byte-level, changes text only by NFC and adds no leading space."""
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
        trims_offsets = any(step.get("trim_offsets") for step in _steps(rules.get("post_processor"), "ByteLevel"))
        vocabulary, byte_characters = tokenizer.get_vocab(), set(pre_tokenizers.ByteLevel.alphabet())
        lengths, leading, trailing = np.zeros((3, max(vocabulary.values()) + 1), dtype=np.int32)
        added = tokenizer.added_tokens_decoder
        for token, token_id in vocabulary.items():
            if token_id in added:
                if token != token.strip():
                    return None
                lengths[token_id] = len(token.encode())
                continue
            if not byte_characters.issuperset(token):
                return None
            lengths[token_id] = len(token)  # a byte-level token's name has one character per byte
            if trims_offsets:  # as `trim_offsets` does: the leading spaces first; a token of spaces has no trailing ones
                leading[token_id] = len(token) - len(token.lstrip(_SPACE))
                trailing[token_id] = len(token) - len(token.rstrip(_SPACE)) if leading[token_id] < len(token) else 0
        trimmed = np.stack([leading, trailing]) if trims_offsets else None
        return cls(backend, lengths, trimmed, normalises=normalizer is not None)

    def ids(self, texts: list[str]) -> list[list[int]]:
        """Tokenise texts, also special tokens in them, and add no token."""
        if self._backend.padding is not None or self._backend.truncation is not None:
            self._backend.no_padding()
            self._backend.no_truncation()
        if self._backend.encode_special_tokens:
            self._backend.encode_special_tokens = False
        # the fast method tracks no offsets, which saves two thirds of the time
        return [encoding.ids for encoding in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def trained_mask(self, ids: list[int], text: str, spans: list[tuple[int, int]]) -> np.ndarray | None:
        """Return `overlap_mask` of the tokens; None if only the tokenizer's offsets can tell."""
        if self._normalises and not unicodedata.is_normalized("NFC", text):
            return None
        is_ascii = text.isascii()
        token_ids = np.frombuffer(array("i", ids), dtype=np.int32)
        token_lengths = self._lengths[token_ids]
        ends = token_lengths.cumsum()
        # the tokenizer dropped or changed some of the text
        if not len(ends) or ends[-1] != (len(text) if is_ascii else len(text.encode())):
            return None
        if not is_ascii:  # from characters to bytes
            spans = [(len(text[:start].encode()), len(text[:end].encode())) for start, end in spans]
        if self._trimmed is not None:
            leading, trailing = self._trimmed[:, token_ids]
            return overlap_mask(np.stack([ends - token_lengths + leading, ends - trailing], axis=1), spans)
        mask = np.zeros(len(ends), dtype=bool)
        for start, end in spans:
            mask[ends.searchsorted(start, "right") : ends.searchsorted(end, "left") + 1] = True
        return mask


def overlap_mask(offsets: list[tuple[int, int]] | np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    """Return whether each token overlaps a span."""
    starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    # offsets may omit white space at a token's start, or be empty for white space: the token starts at the previous end
    previous_ends = np.append(0, np.maximum.accumulate(ends)[:-1]) if len(ends) else ends
    token_starts = np.where(starts < ends, starts, previous_ends)
    mask = np.zeros(len(ends), dtype=bool)
    for span_start, span_end in spans:
        mask |= (token_starts < span_end) & (ends > span_start)
    return mask


def _steps(component: Any, kind: str) -> list[dict[str, Any]]:
    if not isinstance(component, dict):
        return []
    if component.get("type") == kind:
        return [component]
    components = component.get("pretokenizers") or component.get("processors") or []  # of a Sequence
    return [match for step in components for match in _steps(step, kind)]
