"""Rows as questions: the prompt's tokens, and the answer that is expected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from finetune.data.example import Example
from finetune.data.tokens import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def questions_of(examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """`prompt` (text), `prompt_ids` and `answer` of each row. Rows of plain text, which have no prompt, and answers that are
    marked bad are left out."""
    encoder, rows = Encoder(tokenizer, conversations=False), []
    for example in examples:
        question, answer = example.question(), example.reference()
        if question and answer is not None and example.desirable is not False:
            text = question if isinstance(question, str) else question[-1]["content"]
            rows.append({"prompt": text, "prompt_ids": encoder.prompt_ids(question, example.tools), "answer": answer})
    return rows
