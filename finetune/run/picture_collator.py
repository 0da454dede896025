"""Collator for examples with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finetune.data.pictures.processing import PictureProcessor
from finetune.data.pictures.source import source_from_dict
from finetune.data.shards import PICTURES
from finetune.data.tokenizer import ProcessorLoader, read_tokenizer
from finetune.methods.method import Collator
from finetune.settings import Settings


class PictureCollator:
    """Makes the same batch as TRL's vision collator."""

    def __init__(self, text_collator: Collator, processor: PictureProcessor) -> None:
        self._text_collator, self._processor = text_collator, processor

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        text_rows = [{name: value for name, value in row.items() if name != PICTURES} for row in rows]
        batch = dict(self._text_collator(text_rows))
        sources = [[source_from_dict(value) for value in row[PICTURES]] for row in rows]
        # raises DataError for a missing or changed image
        return batch | self._processor.batch(batch["input_ids"], sources)


def picture_processor_of(settings: Settings, data: Path) -> PictureProcessor:
    """Return the processor in a run's data folder."""
    folder = data / "tokenizer"
    return ProcessorLoader(settings, folder)(read_tokenizer(folder, settings))
