"""The batch of a dry run on rows with pictures: the processor's own tensors for pictures of these sizes."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from finetune.compat.torch import with_values
from finetune.data.pictures.placement import PICTURE_MARK
from finetune.data.pictures.processing import blank
from finetune.data.pictures.source import PictureSource
from finetune.data.tokenizer import ModelPictures, load_tokenizer
from finetune.data.tokens import Encoder
from finetune.settings import DatasetRecipe, Recipe

if TYPE_CHECKING:
    from finetune.settings import Settings

Sizes = tuple[tuple[int, int], ...]


def picture_inputs(settings: Settings, rows: int, tokens: int, pictures: Sizes) -> dict[str, Any]:
    """What the collator makes of `rows` rows of `tokens` tokens with pictures of these sizes: tensors with values, but
    labels without. The last row is a token shorter than the others, as where lengths differ.

    Raises RecipeError where the model's processor is not on this machine.
    """
    with with_values():
        ids, kinds, tensors = _processor_input(
            settings.model_name_or_path, settings.model_revision, settings.chat_template, settings.max_pixels, rows, pictures
        )
        width = max(tokens, ids.shape[1])
        padded = torch.full((rows, width), int(ids[0, -1]))
        padded[:, : ids.shape[1]] = ids
        inputs = {"input_ids": padded, "attention_mask": torch.ones_like(padded)}
        if rows > 1:
            inputs["attention_mask"][-1, -1] = 0
        for name, values in kinds.items():
            inputs[name] = torch.zeros_like(padded)
            inputs[name][:, : ids.shape[1]] = values
        # with values, too: Idefics looks for pictures that are all zero
        inputs |= {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in tensors.items()}
    return inputs | {"labels": torch.zeros((rows, width), dtype=torch.long)}


@lru_cache(16)
def _processor_input(
    name: str, revision: str | None, template: str | None, max_pixels: int | None, rows: int, pictures: Sizes
) -> tuple[torch.Tensor, dict[str, Any], dict[str, Any]]:
    """Ids and kinds of the tokens of `rows` times a conversation with these pictures, and their tensors."""
    recipe = Recipe(
        model_name_or_path=name, model_revision=revision, chat_template=template, max_pixels=max_pixels,
        dataset=DatasetRecipe(path="unread"),
    )  # fmt: skip
    encoder = Encoder(load_tokenizer(recipe), pictures=ModelPictures(recipe))
    message: dict[str, Any] = {"role": "user", "content": PICTURE_MARK * len(pictures) + "1"}
    message |= {"pictures": len(pictures)} if pictures else {}
    sources = [PictureSource(None, None, "", *size) for size in pictures]
    ids = torch.tensor([encoder.conversation_ids([message], pictures=sources)] * rows)
    processor = encoder.picture_processor
    return ids, processor.token_types(ids), processor.tensors([[blank(*size) for size in pictures]] * rows)
