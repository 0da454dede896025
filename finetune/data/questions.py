"""Rows as questions: the prompt's tokens, and the answer that is expected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from finetune.data.example import Example
from finetune.data.tokens import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def questions_of(examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """`prompt` (text), `prompt_ids` and `answer` of each row; rows of plain text have no prompt and are left out."""
    encoder, rows = Encoder(tokenizer, conversations=False), []
    for example in examples:
        question, answer = example.question(), example.reference()
        if question and answer is not None:
            text = question if isinstance(question, str) else question[-1]["content"]
            rows.append({"prompt": text, "prompt_ids": encoder.prompt_ids(question, example.tools), "answer": answer})
    return rows
