"""Rows as questions: the prompt's tokens, and the answer that is expected."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from finetune.data.call_syntax import Answer, display_text
from finetune.data.example import Example
from finetune.data.pictures.placement import text_pieces
from finetune.data.pictures.tensors import stored
from finetune.data.tokenizer import ModelPictures
from finetune.data.tokens import Encoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def questions_of(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase, pictures: ModelPictures | None = None
) -> list[dict[str, Any]]:
    """`prompt` (text), `prompt_ids` and `answer` of each row; rows of plain text, which have no prompt, and answers that are
    marked bad are left out.

    Rows with tools also have `tools`, the `calls` of the answer, and its `answer_tokens`; `answer` has the calls as text.
    Rows with pictures have them as `pictures`; `pictures` loads the model's processor.
    """
    encoder, rows = Encoder(tokenizer, conversations=False, pictures=pictures), []
    for example in examples:
        question, calls = example.question(), example.calls()
        answer = display_text(Answer(example.messages[example.answers[-1]]["content"], calls)) if calls else example.reference()
        if not question or answer is None or example.desirable is False:
            continue
        text = question if isinstance(question, str) else _shown(question[-1])
        prompt_ids = encoder.prompt_ids(question, example.tools, example.pictures)
        row: dict[str, Any] = {"prompt": text, "prompt_ids": prompt_ids, "answer": answer}
        if example.tools or calls:
            messages = list(example.messages[: example.answers[-1] + 1])
            answer_tokens = max(0, len(encoder.conversation_ids(messages, example.tools)) - len(prompt_ids))
            row |= {"tools": list(example.tools), "calls": calls, "answer_tokens": answer_tokens}
        if example.pictures:
            row["pictures"] = [stored(picture) for picture in example.pictures]
        rows.append(row)
    return rows


def _shown(message: dict[str, Any]) -> str:
    return " ".join(text_pieces(message)) if "pictures" in message else str(message["content"])
