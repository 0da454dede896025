"""Processors of text and images, without video, as of transformers 5.23.0."""

from __future__ import annotations

import inspect
import json
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image


#: Processors that override `__call__`, with the same batches as TRL (tests/methods/test_pictures_are_trls.py).
_COMPARED_CALLS = ("Gemma3Processor", "Idefics3Processor", "InternVLProcessor")


def why_no_pictures(processor_class: Any) -> str | None:
    """Return why a processor class can't process images, or None."""
    from transformers import ProcessorMixin

    name = getattr(processor_class, "__name__", str(processor_class))
    if not (isinstance(processor_class, type) and issubclass(processor_class, ProcessorMixin)):
        return f"{name} is no processor of pictures and text, or needs torchvision"
    if processor_class.replace_image_token is ProcessorMixin.replace_image_token:
        return f"{name} does not say which text stands for a picture"
    if processor_class.__call__ is not ProcessorMixin.__call__ and name not in _COMPARED_CALLS:
        return f"{name} makes more of a row than text and pictures, which nobody has compared with TRL yet"
    return None


def load_processor(path: str, tokenizer: Any, *, revision: str | None = None) -> Any:
    """Load a checkpoint's processor. Raises LookupError for unsupported types."""
    from transformers import AutoImageProcessor

    processor_class = _processor_class(path, revision)
    image_processor = AutoImageProcessor.from_pretrained(path, revision=revision, backend="pil", trust_remote_code=False)
    values, kwargs = processor_class.get_processor_dict(path, revision=revision)
    parts = {"tokenizer": tokenizer, "image_processor": image_processor}
    return processor_class.from_args_and_dict([parts.get(name) for name in processor_class.get_attributes()], values, **kwargs)


def processor_of(processor_class: Any, image_processor: Any, tokenizer: Any, **settings: Any) -> Any:
    """Return a processor of images and text."""
    # video processors need torchvision
    processor_class, parts = _without_video(processor_class), {"tokenizer": tokenizer, "image_processor": image_processor}
    return processor_class(*(parts.get(name) for name in processor_class.get_attributes()), **settings)


def processor_from_settings(
    processor_class: str, image_processor_type: str, tokenizer: Any, image_settings: dict[str, Any], **settings: Any
) -> Any:
    """Return a processor by class names."""
    import transformers
    from transformers.models.auto.processing_auto import processor_class_from_name

    image_processor = getattr(transformers, f"{image_processor_type}Pil")(**image_settings)
    return processor_of(processor_class_from_name(processor_class), image_processor, tokenizer, **settings)


def save_processor(processor: Any, folder: str) -> None:
    """Write the files for `load_processor`."""
    processor.image_processor.save_pretrained(folder)
    # the class's own `save_pretrained` needs every part
    names = inspect.signature(type(processor).__init__).parameters
    settings = {name: value for name in names if isinstance(value := getattr(processor, name, None), (bool, int, float, str))}
    settings.pop("chat_template", None)
    values = {"processor_class": type(processor).__name__, **settings}
    Path(folder, "processor_config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _processor_class(path: str, revision: str | None) -> Any:
    from transformers import AutoConfig, ImageProcessingMixin, ProcessorMixin
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name

    for read in (ProcessorMixin.get_processor_dict, ImageProcessingMixin.get_image_processor_dict):
        if name := read(path, revision=revision)[0].get("processor_class"):
            processor_class = processor_class_from_name(name)
            break
    else:
        config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=False)
        processor_class = PROCESSOR_MAPPING[type(config)]
    if reason := why_no_pictures(processor_class):
        raise LookupError(reason)
    return _without_video(processor_class)


def _without_video(base: Any) -> Any:
    def check(self: Any, name: str, argument: Any) -> Any:
        # a missing video or sound processor is None
        return None if argument is None else base.check_argument_for_proper_class(self, name, argument)

    return type(base.__name__, (base,), {"check_argument_for_proper_class": check, "__module__": base.__module__})


#: Outputs of image processors that their processors use, not the model; others are in `unused_input_names`.
_FOR_PROCESSORS = ("rows", "cols", "num_patches")


def processed_pictures(processor: Any, rows: Sequence[Sequence[Image]]) -> dict[str, Any]:
    """Return the model's inputs for each row's images."""
    unused = {*processor.unused_input_names, *_FOR_PROCESSORS}
    return {name: value for name, value in _process(processor, rows)[0].items() if name not in unused}


def picture_texts(processor: Any, pictures: Sequence[Image]) -> list[str]:
    """Return the text that replaces each image."""
    return _process(processor, [pictures])[1]


#: Image processors whose count of patches or tiles decides an image's text and number of pixel values.
_BY_PATCHES = ("Qwen2VLImageProcessorPil", "Idefics3ImageProcessorPil", "SmolVLMImageProcessorPil", "GotOcr2ImageProcessorPil")


def picture_kind(processor: Any, width: int, height: int) -> Hashable:
    """Return a key that is equal for images with equal text and as many pixel values."""
    image_processor = processor.image_processor
    name = type(image_processor).__name__
    if name in _BY_PATCHES:
        return image_processor.get_number_of_image_patches(height, width, _image_settings(processor))
    resizes_to_one_size = name == "Gemma3ImageProcessorPil" and not image_processor.do_pan_and_scan
    return () if resizes_to_one_size else (width, height)


def values_per_patch(processor: Any, picture: Image) -> int | None:
    """Return the number of pixel values in a patch, or None for images without a grid of patches."""
    tensors, texts = _process(processor, [[picture]])
    patches = picture_kind(processor, *picture.size)
    if "image_grid_thw" not in tensors or not isinstance(patches, int) or texts != [patch_text(processor, patches)]:
        return None
    values, remainder = divmod(tensors["pixel_values"].numel(), patches)
    return None if remainder else values


def patch_text(processor: Any, patches: int) -> str:
    """Return the placeholder tokens that stand for an image of `patches` patches."""
    import torch

    return processor.replace_image_token({"image_grid_thw": torch.tensor([[1, 1, patches]])}, image_idx=0)


def _process(processor: Any, rows: Sequence[Sequence[Image]]) -> tuple[Any, list[str]]:
    images = processor.image_processor.fetch_images([list(pictures) for pictures in rows])
    return processor._process_images(images, **_image_settings(processor))


def _image_settings(processor: Any) -> dict[str, Any]:
    return dict(_settings(processor, return_tensors="pt")["images_kwargs"])


def _settings(processor: Any, **kwargs: Any) -> dict[str, Any]:
    return processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs, **kwargs)


def with_picture_texts(
    processor: Any, text: str, texts: list[str]
) -> tuple[str, list[tuple[tuple[int, int], tuple[int, int]]]]:
    """Return the text with `texts` in place of image tokens, and the (start, end) of each token and of its text."""
    expanded, moves = processor.get_text_with_replacements([text], texts)
    return expanded[0], [(move["span"], move["new_span"]) for move in moves[0]] if moves else []


def token_types(processor: Any, input_ids: Any) -> dict[str, Any]:
    """Return the model's argument with token types; empty for most models."""
    import torch

    if not _settings(processor)["return_mm_token_type_ids"]:
        return {}
    types = torch.tensor(processor.create_mm_token_type_ids(input_ids.tolist()), dtype=input_ids.dtype)
    # Gemma 3's and PaliGemma's processors rename the argument
    has_usual_name = "mm_token_type_ids" in processor.model_input_names
    return {"mm_token_type_ids" if has_usual_name else "token_type_ids": types}
