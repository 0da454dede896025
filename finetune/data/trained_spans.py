"""Decode a training sequence in spans that are trained on or not."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from finetune.settings.methods import NOT_TRAINED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def decode_spans(input_ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """Decode ids and labels as (text, is trained) spans."""
    spans: list[tuple[str, bool]] = []
    end, previous_text = 0, ""
    for trained, span_labels in itertools.groupby(labels, key=lambda label: label != NOT_TRAINED):
        start, end = end, end + sum(1 for _ in span_labels)
        # decoded from the start: a part of a character, or a token that loses a space alone, comes out right
        text = _decode(tokenizer, input_ids[:end])
        span_text = text[len(previous_text) :] if text.startswith(previous_text) else _decode(tokenizer, input_ids[start:end])
        spans.append((span_text, trained))
        previous_text = text
    return spans


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
