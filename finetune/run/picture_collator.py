"""Batches of rows with pictures: TRL's collator for the tokens, and the model's own processor for the pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from finetune.data.pictures.columns import PICTURES
from finetune.data.pictures.tensors import PictureTensors, source_of
from finetune.data.tokenizer import ModelPictures, run_tokenizer

if TYPE_CHECKING:
    from finetune.data.pictures.processing import PictureProcessor
    from finetune.methods.method import Collator
    from finetune.settings import Settings


class PictureCollator:
    """Makes the batch that TRL's vision collator makes of the same rows."""

    def __init__(self, tokens: Collator, processor: PictureProcessor) -> None:
        self._tokens, self._tensors = tokens, PictureTensors(processor)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """The batch. Raises DataError for a picture that is gone or was changed."""
        batch = dict(self._tokens([{name: value for name, value in row.items() if name != PICTURES} for row in rows]))
        sources = [[source_of(value) for value in row[PICTURES]] for row in rows]
        return batch | self._tensors(batch["input_ids"], sources)


def picture_processor_of(settings: Settings, folder: Path) -> PictureProcessor:
    """The processor that a run has saved beside its tokenizer."""
    return ModelPictures(settings, folder)(run_tokenizer(folder, settings))
