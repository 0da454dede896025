"""Make the image tensors of a batch; images used last stay decoded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.pictures.source import BadPicture, PictureSource, open_picture
from finetune.errors import DataError
from finetune.units import MIB

if TYPE_CHECKING:
    from PIL.Image import Image

    from finetune.data.pictures.processing import PictureProcessor

#: Bytes of decoded and scaled images that a process keeps.
_CACHE_BYTES = 256 * MIB


class PictureTensors:
    """Makes image tensors with a model's processor."""

    def __init__(self, processor: PictureProcessor) -> None:
        self._processor = processor
        self._decoded: OrderedDict[str, Image] = OrderedDict()
        self._free_bytes = _CACHE_BYTES

    def __call__(self, input_ids: Any, rows: Sequence[Sequence[PictureSource]]) -> dict[str, Any]:
        """Return pixels of each row's images, and kinds of tokens. Raise DataError."""
        images = [[self._picture(source) for source in pictures] for pictures in rows]
        return self._processor.token_types(input_ids) | self._processor.tensors(images)

    def _picture(self, source: PictureSource) -> Image:
        if source.digest in self._decoded:
            self._decoded.move_to_end(source.digest)
            return self._decoded[source.digest]
        try:
            picture = self._processor.scaled(open_picture(source))
        except BadPicture as error:
            raise DataError(f"{source.path.name} {error}", "Restore the file, or start a new run.") from None
        self._decoded[source.digest] = picture
        self._free_bytes -= _bytes(picture)
        while self._free_bytes < 0 and len(self._decoded) > 1:
            self._free_bytes += _bytes(self._decoded.popitem(last=False)[1])
        return picture


def _bytes(picture: Image) -> int:
    return 3 * picture.width * picture.height


def source_of(value: dict[str, Any]) -> PictureSource:
    """Read an image of a stored row."""
    return PictureSource(**value | {"path": Path(value["path"])})


def stored(source: PictureSource) -> dict[str, Any]:
    """Return an image as JSON values for `source_of`."""
    return vars(source) | {"path": str(source.path)}
