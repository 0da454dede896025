"""Rows of plain text with exact lengths in tokens, for the bundled tokenizer."""

from __future__ import annotations

import json
from pathlib import Path


def write_rows(path: Path, longest: int, count: int, documents: int = 1) -> None:
    """Write `count` rows of half of `longest` to all of it, EOS included; for packing, rows of a `documents`-th each."""
    from transformers import AutoTokenizer

    from finetune.bundled import model_path

    tokenizer = AutoTokenizer.from_pretrained(str(model_path("tiny")))
    digits = "".join(str(number % 10) for number in range(2 * longest))
    offsets = tokenizer(digits, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            tokens = longest // documents if documents > 1 else longest - number * 37 % 64 * longest // 128
            file.write(json.dumps({"text": digits[: offsets[tokens - 2][1]]}) + "\n")
