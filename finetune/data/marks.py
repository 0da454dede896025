"""One sequence as text with its learnt stretches marked, exactly as the model is given it."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from finetune.data.tokens import NOT_TRAINED
from finetune.errors import FinetuneError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from finetune.data.preparation import PreparedData


def mark_example(prepared: PreparedData, tokenizer: PreTrainedTokenizerBase, index: int = 0) -> list[tuple[str, bool]]:
    """Stretches of training sequence `index` as (text, learnt), special tokens written out; joined, all of it.

    Without any training sequence it is empty. Raises FinetuneError for a number that there is not.
    """
    if not len(prepared.train):
        return []
    if not 0 <= index < len(prepared.train):
        raise FinetuneError(f"there is no training sequence {index}", f"They are numbered 0 to {len(prepared.train) - 1}.")
    row = prepared.train[index]
    return marked(row["input_ids"], row["labels"], tokenizer)


def marked(input_ids: list[int], labels: list[int], tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    """The same for ids and labels.

    Each stretch is what decoding up to its end adds to decoding up to its beginning: tokens that are only part of a character,
    or that lose a space when they stand alone, come out as they are read in place.
    """
    stretches: list[tuple[str, bool]] = []
    end, before = 0, ""
    for learnt, tokens in itertools.groupby(labels, key=lambda label: label != NOT_TRAINED):
        start, end = end, end + sum(1 for _ in tokens)
        text = _decode(tokenizer, input_ids[:end])
        added = text[len(before) :] if text.startswith(before) else _decode(tokenizer, input_ids[start:end])
        stretches.append((added, learnt))
        before = text
    return stretches


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
