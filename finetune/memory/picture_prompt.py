"""Prompts and batches with images, without a data set: from the model's processor or the catalogue's facts."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from finetune.bundled import model_path
from finetune.compat.processors import processor_from_settings, token_types
from finetune.data.pictures.placement import PICTURE_MARK
from finetune.data.pictures.processing import PictureProcessor, blank
from finetune.data.pictures.source import PictureSource, require_pillow
from finetune.data.tokenizer import ProcessorLoader, load_tokenizer
from finetune.data.tokens import Encoder
from finetune.errors import ModelError
from finetune.hub import VALID_S
from finetune.model.configuration import read_config
from finetune.model.transformers_config import load_config
from finetune.settings import DatasetRecipe, Recipe, Settings
from finetune.settings.compatibility import Sizes


@dataclass(frozen=True)
class PicturePrompt:
    """A tokenized prompt with images."""

    ids: list[int]
    token_types: dict[str, Any]
    processor: PictureProcessor
    #: Tokens of each image.
    token_counts: tuple[int, ...]
    #: Width and height of each image after `max_pixels`.
    sizes: Sizes


def picture_prompt(settings: Recipe | Settings, pictures: Sizes) -> PicturePrompt:
    """Return a message with images of these sizes and one character. Raises RecipeError for an unknown processor."""
    model = settings.model_name_or_path, settings.model_revision, settings.chat_template
    # the period changes every VALID_S seconds, so that a hub that failed is tried again
    return _prompt(*model, settings.pixel_limit, pictures, _period=int(time.monotonic() / VALID_S))


def picture_inputs(settings: Settings, rows: int, tokens: int, pictures: Sizes) -> dict[str, Any]:
    """Return the collator's batch of these images; only labels lack values. Raises RecipeError without a processor."""
    with _disable_current_modes():  # later dry runs reuse the cached tensors, so they are neither fake nor tracked
        prompt = picture_prompt(settings, pictures)
        tensors = _blank_tensors(prompt.processor, rows, pictures)
    with unset_fake_temporarily():
        width = max(tokens, len(prompt.ids))
        padded = torch.full((rows, width), prompt.ids[-1])
        padded[:, : len(prompt.ids)] = torch.tensor(prompt.ids)
        inputs = {"input_ids": padded, "attention_mask": torch.ones_like(padded)}
        # the last row is a token shorter, so that models don't ignore the mask
        if rows > 1:
            inputs["attention_mask"][-1, -1] = 0
        for name, types in prompt.token_types.items():
            inputs[name] = torch.zeros_like(padded)
            inputs[name][:, : len(prompt.ids)] = types
        # real values: Idefics looks for images that are all zero
        inputs |= {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in tensors.items()}
    return inputs | {"labels": torch.zeros((rows, width), dtype=torch.long)}


@lru_cache(16)
def _blank_tensors(processor: PictureProcessor, rows: int, pictures: Sizes) -> dict[str, Any]:
    return processor.tensors([[blank(*size) for size in pictures]] * rows)


@lru_cache(16)
def _prompt(
    name: str, revision: str | None, template: str | None, max_pixels: int | None, pictures: Sizes, _period: int
) -> PicturePrompt:
    recipe = Recipe(
        model_name_or_path=name, model_revision=revision, chat_template=template, max_pixels=max_pixels,
        dataset=DatasetRecipe(path="unread"),
    )  # fmt: skip
    try:
        tokenizer = load_tokenizer(recipe)
    except ModelError:
        return _catalogue_prompt(recipe, pictures)
    encoder = Encoder(tokenizer, processor_loader=ProcessorLoader(recipe))
    message: dict[str, Any] = {"role": "user", "content": PICTURE_MARK * len(pictures) + "1"}
    message |= {"pictures": len(pictures)} if pictures else {}
    sources = [PictureSource(Path(), "", *size) for size in pictures]
    return _prompt_of(encoder.conversation_ids([message], pictures=sources), encoder.picture_processor, pictures)


def _catalogue_prompt(recipe: Recipe, pictures: Sizes) -> PicturePrompt:
    """Return the prompt from the facts of the model's type. Raises ModelError without facts."""
    values = read_config(recipe)
    facts = _facts().get(str(values.get("model_type")))
    if facts is None or "vision_config" not in values:
        raise ModelError(
            f"{recipe.model_name_or_path}: the tokens per image are unknown: the processor is neither on this machine "
            "nor in the catalogue",
            f"Load the model once while online, or plan another model type: {', '.join(sorted(_facts()))}.",
        )
    from transformers import AutoTokenizer

    require_pillow()
    tokenizer: Any = AutoTokenizer.from_pretrained(model_path("tiny"), extra_special_tokens=dict(facts.get("attributes", {})))
    tokenizer.model_max_length = 2**30
    tokenizer.add_special_tokens({"additional_special_tokens": list(facts["tokens"])}, replace_extra_special_tokens=False)
    processor = PictureProcessor(
        processor_from_settings(
            facts["processor_class"], facts["image_processor_type"], tokenizer, facts["settings"],
            **facts.get("processor_settings", {}),
        ),
        recipe.pixel_limit,
    )  # fmt: skip
    texts, image_token = [processor.text_of(*size) for size in pictures], processor.processor.image_token
    if image_token in facts["mark"]:  # otherwise the texts include the tokens around the image
        texts = [facts["mark"].replace(image_token, text) for text in texts]
    ids = tokenizer(f"1{''.join(texts)}1", add_special_tokens=False)["input_ids"]
    prompt = _prompt_of(ids, processor, pictures)
    config = load_config(recipe)
    # the bundled tokenizer's ids of special tokens -> the model's
    model_ids = {tokenizer.convert_tokens_to_ids(token): getattr(config, key) for token, key in facts["tokens"].items()}
    return replace(prompt, ids=[model_ids.get(token_id, token_id) for token_id in ids])


def _prompt_of(ids: list[int], processor: PictureProcessor, pictures: Sizes) -> PicturePrompt:
    token_counts = tuple(processor.token_count(*size) for size in pictures)
    sizes = tuple(processor.size(*size) for size in pictures)
    return PicturePrompt(ids, token_types(processor.processor, torch.tensor([ids])), processor, token_counts, sizes)


@cache
def _facts() -> dict[str, dict[str, Any]]:
    path = Path(__file__).parents[1] / "model" / "picture_processors.json"
    facts: dict[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["types"]
    return facts | {other: row for row in facts.values() for other in row.get("also", ())}
