"""Rows as questions: the prompt's tokens, and the answer that is expected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from finetune.data.call_syntax import Answer, display_text
from finetune.data.example import Example
from finetune.data.tokens import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def questions_of(examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """`prompt` (text), `prompt_ids` and `answer` of each row; rows of plain text, which have no prompt, and answers that are
    marked bad are left out.

    Rows with tools also have `tools`, the `calls` of the answer, and its `answer_tokens`; `answer` has the calls as text.
    """
    encoder, rows = Encoder(tokenizer, conversations=False), []
    for example in examples:
        question, calls = example.question(), example.calls()
        answer = display_text(Answer(example.messages[example.answers[-1]]["content"], calls)) if calls else example.reference()
        if not question or answer is None or example.desirable is False:
            continue
        text = question if isinstance(question, str) else question[-1]["content"]
        prompt_ids = encoder.prompt_ids(question, example.tools)
        row: dict[str, Any] = {"prompt": text, "prompt_ids": prompt_ids, "answer": answer}
        if example.tools or calls:
            row |= {"tools": list(example.tools), "calls": calls, "answer_tokens": _answer_tokens(example, encoder, prompt_ids)}
        rows.append(row)
    return rows


def _answer_tokens(example: Example, encoder: Encoder, prompt_ids: list[int]) -> int:
    """Tokens of a row's last answer."""
    messages = list(example.messages[: example.answers[-1] + 1])
    return max(0, len(encoder.conversation_ids(messages, example.tools)) - len(prompt_ids))
