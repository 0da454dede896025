"""Batches of rows for generation and loss, halved when GPU memory runs out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from finetune.model.new_tokens import embedding_rows

#: Prompt and answer tokens of a batch, with padding. An 8B model's KV cache of 32,768 tokens takes 4 GiB.
#: On a CPU, more tokens than its caches hold are slower, and a small batch ends early.
ANSWER_TOKENS = {"cpu": 8_192, "cuda": 32_768}
_LOSS_TOKENS = 1_024  # of a batch whose loss is computed
_MAX_LOGITS = 64 * 2**20  # of such a batch: 256 MiB in float32


def loss_batch_tokens(model: Any) -> int:
    """Return the tokens of a batch whose loss is computed."""
    return min(_LOSS_TOKENS, _MAX_LOGITS // embedding_rows(model))


def batches(lengths: list[int], max_tokens: int) -> list[list[int]]:
    """Return batches of row indices, longest first, of at most `max_tokens` padded tokens."""
    row_batches: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        # rows are padded to a batch's first row, which is its longest
        if row_batches and (len(row_batches[-1]) + 1) * lengths[row_batches[-1][0]] <= max_tokens:
            row_batches[-1].append(index)
        else:
            row_batches.append([index])  # even a row of more than `max_tokens`
    return row_batches


def run_halving(rows: list[int], work: Callable[[list[int]], None]) -> None:
    """Call `work(rows)`, and with half of the rows when GPU memory runs out. Raise the error of a single row."""
    try:
        work(rows)
    except torch.OutOfMemoryError:
        if len(rows) == 1:
            raise
        torch.cuda.empty_cache()
    else:
        return
    # not in `except`, where the error would keep the failed call's tensors alive
    for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
        run_halving(half, work)
