"""Rows with images, for every vision-language type of transformers: trained on, text only, or refused, and why.

    python benchmarks/picture_types.py             # the table
    python benchmarks/picture_types.py --write     # also writes benchmarks/reference/picture_types.csv

Covers the types of AutoModelForImageTextToText. Needs no GPU, no network and no weights.
"""

from __future__ import annotations

import inspect
import re
import sys

import model_types
from tables import REFERENCE, read_table, write_table

#: Batches, losses and forecasts of small models were compared; nothing is known against it; its text alone; nothing.
COMPARED, NOT_COMPARED, TEXT_ONLY, REFUSED = "compared", "not compared", "text only", "refused"
TABLE = REFERENCE / "picture_types.csv"


def table() -> dict[str, tuple[str, str]]:
    """Model type -> result and reason, from the committed table."""
    return {row["model_type"]: (row["result"], row["reason"]) for row in read_table(TABLE)}


def picture_types() -> list[str]:
    """Every model type of images and text of the installed transformers."""
    from transformers.models.auto import modeling_auto

    return sorted(modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def outcome_of(kind: str) -> tuple[str, str]:
    """Return the result for a type, and why its images are not read."""
    from picture_models import kinds

    if kind in kinds():
        return COMPARED, ""
    row = model_types.table()[kind]
    refused, detail = row["result"] == REFUSED, row["detail"]
    # a default configuration may be refused whose checkpoints have other values
    if refused and not re.search("can't be built from this config.json|a training step of this", detail):
        return REFUSED, detail
    if reason := _why_no_pictures(kind):
        return (REFUSED if refused else TEXT_ONLY), reason
    return NOT_COMPARED, ""


def _why_no_pictures(kind: str) -> str | None:
    """Return why a type's images can't be read, by its configuration and its classes in transformers."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    from finetune.compat.processors import why_no_pictures
    from finetune.model.language_model import is_multimodal

    if not is_multimodal(CONFIG_MAPPING[kind]()):
        return "its configuration does not say which part is its language model"
    if kind not in PROCESSOR_MAPPING_NAMES:
        return "transformers names no processor of pictures and text for it"
    image_processors = IMAGE_PROCESSOR_MAPPING_NAMES.get(kind, {})
    if image_processors and "pil" not in image_processors:
        return f"{image_processors['torchvision']} needs torchvision"
    processor = processor_class_from_name(PROCESSOR_MAPPING_NAMES[kind])
    if reason := why_no_pictures(processor):
        return reason
    needs_package = "num2words" in inspect.getsource(processor)
    return f"{processor.__name__} needs the package num2words" if needs_package else None


def main() -> None:
    """Print the table."""
    rows = [dict(zip(("model_type", "result", "reason"), (kind, *outcome_of(kind)), strict=True)) for kind in picture_types()]
    for row in rows:
        print(", ".join(row.values()))
    if "--write" in sys.argv:
        write_table(TABLE, rows)


if __name__ == "__main__":
    main()
