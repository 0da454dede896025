"""One training sequence as text, with its trained spans marked."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from finetune.data.tokens import NOT_TRAINED
from finetune.errors import FinetuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data.preparation import PreparedData


def mark_example(prepared: PreparedData, tokenizer: PreTrainedTokenizerBase, index: int = 0) -> list[tuple[str, bool]]:
    """Training sequence `index` as spans of (text, trained), with special tokens; joined they are the whole text.

    Empty without any training sequence. Raises FinetuneError for an index out of range.
    """
    count = len(prepared.lengths)
    if not count:
        return []
    if not 0 <= index < count:
        raise FinetuneError(f"there is no training sequence {index}", f"The last one is {count - 1}; the first is 0.")
    return marked(*prepared.sequence(index), tokenizer)


def marked(input_ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """The same for ids and labels.

    A span's text is what decoding up to its end adds to decoding up to its start, so that tokens that are part of a character
    or lose a space when decoded alone come out right.
    """
    spans: list[tuple[str, bool]] = []
    end, before = 0, ""
    for trained, tokens in itertools.groupby(labels, key=lambda label: label != NOT_TRAINED):
        start, end = end, end + sum(1 for _ in tokens)
        text = _decode(tokenizer, input_ids[:end])
        added = text[len(before) :] if text.startswith(before) else _decode(tokenizer, input_ids[start:end])
        spans.append((added, trained))
        before = text
    return spans


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
