"""The batch of a dry run on rows with pictures: the processor's own tensors for pictures of these sizes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from finetune.data.pictures.processing import PictureProcessor, blank
from finetune.memory.picture_prompt import picture_prompt
from finetune.settings import Settings
from finetune.settings.vision import Sizes


def picture_inputs(settings: Settings, rows: int, tokens: int, pictures: Sizes) -> dict[str, Any]:
    """What the collator makes of `rows` rows of `tokens` tokens with pictures of these sizes: tensors with values, but
    labels without. The last row is a token shorter than the others, as where lengths differ.

    Raises RecipeError where the model's processor is not on this machine.
    """
    with _disable_current_modes():  # the kept tensors are host memory
        prompt = picture_prompt(settings, pictures)
        tensors = _tensors(prompt.processor, rows, pictures)
    with unset_fake_temporarily():
        width = max(tokens, len(prompt.ids))
        padded = torch.full((rows, width), prompt.ids[-1])
        padded[:, : len(prompt.ids)] = torch.tensor(prompt.ids)
        inputs = {"input_ids": padded, "attention_mask": torch.ones_like(padded)}
        if rows > 1:
            inputs["attention_mask"][-1, -1] = 0
        for name, values in prompt.token_types.items():
            inputs[name] = torch.zeros_like(padded)
            inputs[name][:, : len(prompt.ids)] = values
        # with values, too: Idefics looks for pictures that are all zero
        inputs |= {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in tensors.items()}
    return inputs | {"labels": torch.zeros((rows, width), dtype=torch.long)}


@lru_cache(16)
def _tensors(processor: PictureProcessor, rows: int, pictures: Sizes) -> dict[str, Any]:
    return processor.tensors([[blank(*size) for size in pictures]] * rows)
