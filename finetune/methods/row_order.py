"""The order of examples in a run: the longest early, each step sorted by length."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from pyarrow import compute
from torch.utils.data import Sampler

from finetune.settings.methods import NOT_TRAINED


def row_lengths(rows: Any) -> list[int]:
    """Return the tokens of each example, or of its longest answer."""
    # from the offsets: a million rows as lists of integers would take minutes and gigabytes
    columns = _columns(rows, "input_ids")
    return np.max([compute.list_value_length(ids).to_numpy(zero_copy_only=False) for ids in columns], axis=0).tolist()


def trained_counts(rows: Any) -> list[int]:
    """Return the tokens of each example that count in the loss, for several answers their mean, rounded up."""
    means = np.mean([_trained_per_row(labels.combine_chunks()) for labels in _columns(rows, "labels")], axis=0)
    return np.ceil(means).astype(int).tolist()


def _columns(rows: Any, name: str) -> list[Any]:
    table = rows.with_format("arrow")[:]
    return [table[column] for column in table.column_names if column.endswith(name)]


def _trained_per_row(labels: Any) -> np.ndarray:
    row_ends = np.cumsum(compute.list_value_length(labels).to_numpy(zero_copy_only=False))
    trained_before = np.concatenate(([0], np.cumsum(labels.flatten().to_numpy(zero_copy_only=False) != NOT_TRAINED)))
    return np.diff(trained_before[row_ends], prepend=0)


# The two longest rows train in the first two optimizer steps, so that out of memory happens there and not at step 2,321. The
# second longest starts step 1: weights and activations. The longest ends step 2, where the optimizer's states and, with
# gradient accumulation, the gradients of earlier micro-batches are in memory, too: the peak of the forecast. The row with
# most pixel values is in step 2, too, or, where step 2 has a single row, in step 1 instead of the second longest. These rows
# swap places with others, so each row still trains once an epoch.
class LongestEarly(Sampler[int]):
    """Random order by seed and epoch, with the longest examples in the first two steps and each step sorted by length."""

    def __init__(self, lengths: list[int], seed: int, batch: int, steps: int, pixel_values: Sequence[int] = ()) -> None:
        # `batch`, the effective batch size, is independent of an out-of-memory retry: so is the order
        self._lengths, self._pixel_values, self._seed = lengths, pixel_values, seed
        self._batch, self._steps, self._epoch = batch, steps, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = torch.randperm(len(self._lengths), generator=generator).tolist()
        for index, row in self._early_rows().items():
            old_index = order.index(row)
            order[index], order[old_index] = row, order[index]
        for start in range(0, len(order), self._batch):
            rows = order[start : start + self._batch]
            # micro-batches with little padding; the step's gradient stays the same
            is_first_step = start == self._epoch == 0
            yield from sorted(rows, key=self._lengths.__getitem__, reverse=is_first_step)

    def _early_rows(self) -> dict[int, int]:
        # index in the order -> row
        indices = self._longest_indices()
        longest = heapq.nlargest(len(indices), range(len(self)), key=self._lengths.__getitem__)
        early = dict(zip(indices, longest, strict=True))
        if not early or not any(self._pixel_values):
            return early
        most_pixels = max(range(len(self)), key=self._pixel_values.__getitem__)
        if most_pixels not in early.values():  # beside the longest row, or instead of the second longest
            early[indices[0] - 1 if indices[0] else 1] = most_pixels
        return early

    def _longest_indices(self) -> tuple[int, ...]:
        # of the longest row, then of the second longest
        rows = len(self._lengths)
        is_one_step = rows <= self._batch
        if rows == 0 or self._epoch > 1:
            return ()
        if self._epoch == 1:  # step 2, where an epoch has one step
            return (rows - 1,) if is_one_step else ()
        return (0,) if is_one_step or self._steps == 1 else (min(2 * self._batch, rows) - 1, 0)
