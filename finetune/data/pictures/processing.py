"""Turn images into a model's text and tensors."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from finetune.compat.processors import (
    patch_text,
    picture_kind,
    picture_texts,
    processed_pictures,
    token_types,
    values_per_patch,
    with_picture_texts,
)
from finetune.data.checks import BadRow
from finetune.data.pictures.source import BadPicture, open_picture, require_pillow
from finetune.data.template import Rendered, moved_spans
from finetune.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

    from finetune.data.pictures.source import PictureSource


class PictureProcessor:
    """A model's processor for images."""

    def __init__(self, processor: Any, max_pixels: int | None) -> None:
        self.processor = processor
        self.max_pixels = max_pixels  # larger images are scaled down first; None: no limit
        self._kinds: dict[Hashable, tuple[str, int]] = {}  # by kind of image: its text and number of pixel values

    def size(self, width: int, height: int) -> tuple[int, int]:
        """Return an image's size within `max_pixels`, in the same shape."""
        if self.max_pixels is None or width * height <= self.max_pixels:
            return width, height
        scale = math.sqrt(self.max_pixels / (width * height))
        return max(1, math.floor(width * scale)), max(1, math.floor(height * scale))

    def batch(self, input_ids: Any, rows: Sequence[Sequence[PictureSource]]) -> dict[str, Any]:
        """Return pixels of each row's images, and kinds of tokens. Raise DataError."""
        return token_types(self.processor, input_ids) | self.tensors([list(map(self._open, sources)) for sources in rows])

    def _open(self, source: PictureSource) -> Image:
        try:
            picture = open_picture(source)
        except BadPicture as error:
            raise DataError(f"{source.path.name} {error}", "Restore the file, or start a new run.") from None
        size = self.size(*picture.size)
        return picture if size == picture.size else picture.resize(size)

    def tensors(self, rows: Sequence[Sequence[Image]]) -> dict[str, Any]:
        """Return the model's inputs for each row's scaled images."""
        return processed_pictures(self.processor, rows) if any(rows) else {}

    def expanded(self, rendered: Rendered, pictures: Sequence[PictureSource]) -> Rendered:
        """Put each image's text in place of its token. Raise BadRow."""
        texts = [self.text_of(picture.width, picture.height) for picture in pictures]
        count = rendered.text.count(self.processor.image_token)
        if count != len(texts):
            raise BadRow("messages", f"the chat template writes {count} image tokens for {len(texts)} image(s)")
        text, moves = with_picture_texts(self.processor, rendered.text, texts)
        replaced = [(before, end - start) for before, (start, end) in moves]
        return replace(rendered, text=text, spans=moved_spans(rendered.spans, replaced))  # `escaped_spans` is still empty

    def text_of(self, width: int, height: int) -> str:
        return self._text_and_values(*self.size(width, height))[0]

    def _text_and_values(self, width: int, height: int) -> tuple[str, int]:
        kind = picture_kind(self.processor, width, height)  # the number of patches, if the processor has a rule
        if kind not in self._kinds:
            if isinstance(kind, int) and self._values_per_patch is not None:
                self._kinds[kind] = patch_text(self.processor, kind), kind * self._values_per_patch
            else:  # both depend only on the size, so a blank image gives the same
                text = picture_texts(self.processor, [blank(width, height)])[0]
                self._kinds[kind] = text, self._processed_values(width, height)
        return self._kinds[kind]

    @cached_property
    def _values_per_patch(self) -> int | None:
        # an image that checks the processor's rule for patches: sides that are no multiple of any patch, and no square
        return values_per_patch(self.processor, blank(430, 310))

    def token_count(self, width: int, height: int) -> int:
        return len(self.processor.tokenizer(self.text_of(width, height), add_special_tokens=False)["input_ids"])

    def value_count(self, width: int, height: int) -> int:
        """Return the number of pixel values of a scaled image."""
        return self._text_and_values(width, height)[1]

    def _processed_values(self, width: int, height: int) -> int:
        tensors = self.tensors([[blank(width, height)]]).values()
        return sum(tensor.numel() for tensor in tensors if hasattr(tensor, "is_floating_point") and tensor.is_floating_point())

    def values_by_row(self, sizes: np.ndarray, row_count: int) -> np.ndarray:
        """Return each row's number of pixel values from unscaled `shards.picture_sizes`."""
        distinct, indices = np.unique(sizes[:, 1:], axis=0, return_inverse=True)
        counts = np.array([self.value_count(*self.size(width, height)) for width, height in distinct.tolist()], np.int64)
        return np.bincount(sizes[:, 0], counts[indices.ravel()], row_count).astype(np.int64)


def blank(width: int, height: int) -> Image:
    """Return a grey image."""
    require_pillow()
    import PIL.Image

    return PIL.Image.new("RGB", (width, height), (127, 127, 127))
