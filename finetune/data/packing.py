"""Pack rows into sequences with TRL, and check that no token is missing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from finetune.errors import DataError, FinetuneError
from finetune.settings.methods import NOT_TRAINED

if TYPE_CHECKING:
    from datasets import Dataset


def pack(dataset: Dataset, max_length: int, seed: int) -> Dataset:
    """Pack rows best-fit into sequences of at most `max_length` tokens. Raise DataError or FinetuneError."""
    import datasets
    from trl import pack_dataset

    before, longest = _totals(dataset)
    # TRL would truncate the row silently
    if longest > max_length:
        raise DataError(
            f"a row has {longest:,} tokens, more than a packed sequence (max_length {max_length:,})",
            "Raise max_length, or choose  excess_length=drop  or  excess_length=truncate",
        )
    bars_disabled = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        # TRL packs a thousand rows at a time, so they are shuffled first
        packed = pack_dataset(dataset.select_columns(["input_ids", "labels"]).shuffle(seed=seed), max_length, "bfd")
    finally:
        if not bars_disabled:
            datasets.enable_progress_bars()
    after, longest = _totals(packed)
    after["rows"] = sum(len(lengths) for lengths in packed["seq_lengths"])
    if before != after or longest > max_length:
        raise FinetuneError(
            f"packing changed the data: {dict(before)} before, {dict(after)} after, longest {longest:,} of {max_length:,}"
        )
    return packed


def _totals(dataset: Dataset) -> tuple[Counter[str], int]:
    totals, longest = Counter[str](), 0
    for batch in dataset.with_format("numpy").iter(batch_size=1000):
        ids, labels = (
            np.concatenate([np.asarray(row, dtype=np.int64) for row in batch[name]]) for name in ("input_ids", "labels")
        )
        totals.update({
            "rows": len(batch["input_ids"]), "tokens": ids.size, "trained tokens": int((labels != NOT_TRAINED).sum()),
            "sum of ids": int(ids.sum()), "sum of labels": int(labels.sum()), "labels that agree": int((ids == labels).sum()),
        })  # fmt: skip
        longest = max(longest, *map(len, batch["input_ids"]))
    return totals, longest
