"""Turn rows into questions: the prompt's tokens and the expected answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from finetune.data.chat_format import thought_and_text
from finetune.data.conversation import Example
from finetune.data.pictures.placement import text_pieces
from finetune.data.pictures.source import stored
from finetune.data.tokenizer import ModelPictures
from finetune.data.tokens import Encoder
from finetune.data.tool_calls import Answer, display_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def questions_of(
    examples: Iterable[Example], tokenizer: PreTrainedTokenizerBase, pictures: ModelPictures | None = None
) -> list[dict[str, Any]]:
    """Return prompt, tokens and answer of each row, with thought, calls and images if any."""
    encoder, rows = Encoder(tokenizer, conversations=False, pictures=pictures), []
    for example in examples:
        question, calls, answer, thought = example.question(), example.calls(), example.reference(), ""
        if example.messages:
            thought, text = thought_and_text(example.messages[example.answers[-1]])
            answer = display_text(Answer(text, calls))
        # plain text has no prompt, and an answer marked bad is no reference
        if not question or answer is None or example.desirable is False:
            continue
        last: Any = question[-1]
        text = question if isinstance(question, str) else " ".join(text_pieces(last)) if "pictures" in last else last["content"]
        prompt_ids = encoder.prompt_ids(question, example.tools, example.pictures)
        row: dict[str, Any] = {"prompt": text, "prompt_ids": prompt_ids, "answer": answer}
        if example.messages:
            messages = list(example.messages[: example.answers[-1] + 1])
            whole = encoder.conversation_ids(messages, example.tools, pictures=example.pictures)
            # tokens of thought and answer
            row |= {"thought": thought, "answer_tokens": max(0, len(whole) - len(prompt_ids))}
        if example.tools or calls:
            row |= {"tools": list(example.tools), "calls": calls}
        if example.pictures:
            row["pictures"] = [stored(picture) for picture in example.pictures]
        rows.append(row)
    return rows
