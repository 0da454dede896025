"""Packing loses no token; rows that don't fit are refused, not truncated."""

import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.data.splits import pack
from finetune.errors import DataError

pytestmark = pytest.mark.slow  # imports TRL


def dataset_of(lengths):
    """Rows of distinct ids; every third token is not trained."""
    rows, start = [], 0
    for length in lengths:
        rows.append(list(range(start, start + length)))
        start += length
    return Dataset.from_dict(
        {"input_ids": rows, "labels": [[-100 if token % 3 == 0 else token for token in row] for row in rows]}
    )


def unpacked(packed):
    rows = []
    for row in packed:
        start = 0
        for length in row["seq_lengths"]:
            rows.append((tuple(row["input_ids"][start : start + length]), tuple(row["labels"][start : start + length])))
            start += length
        assert start == len(row["input_ids"]) == len(row["labels"])
    return sorted(rows)


@settings(max_examples=12, deadline=None)
@given(lengths=st.lists(st.integers(1, 32), min_size=1, max_size=40), seed=st.integers(0, 3))
def test_every_row_comes_out_of_packing_whole_with_its_labels(lengths, seed):
    dataset = dataset_of(lengths)
    packed = pack(dataset, 32, seed)
    assert unpacked(packed) == sorted((tuple(row["input_ids"]), tuple(row["labels"])) for row in dataset)
    assert max(len(row) for row in packed["input_ids"]) <= 32
    assert packed.column_names == ["input_ids", "labels", "seq_lengths"]


def test_packing_thousands_of_rows_fills_sequences_and_is_the_same_for_the_same_seed():
    dataset = dataset_of([1 + (n * 37) % 90 for n in range(2500)])
    packed = pack(dataset, 128, 1)
    assert len(packed) < 1.05 * sum(len(row) for row in dataset["input_ids"]) / 128 + 3
    assert packed["input_ids"][:] == pack(dataset, 128, 1)["input_ids"][:] != pack(dataset, 128, 2)["input_ids"][:]


def test_a_row_longer_than_the_sequence_is_refused_where_trl_would_cut_it():
    from trl import pack_dataset

    dataset = dataset_of([5, 40])
    assert sum(map(len, pack_dataset(dataset, 32)["input_ids"])) == 37
    with pytest.raises(DataError, match="40 tokens.*max_length 32"):
        pack(dataset, 32, 0)
