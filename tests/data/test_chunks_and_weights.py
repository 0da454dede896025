"""Long texts in chunks, and several files with weights: no token is missing, and a seed repeats the choice of rows."""

import pytest
from small_data import build_tokenizer, prepare, recipe

from finetune.errors import RecipeError

TOKENIZER = build_tokenizer()


def prepared(path, max_length=None, **settings):
    return prepare(recipe(path, **settings), TOKENIZER, max_length=max_length)


def ids_of(prepared_data):
    return [row["input_ids"] for row in prepared_data.train]


def test_a_long_text_is_cut_into_even_chunks_without_losing_a_token(write):
    path = write("rows.jsonl", [{"text": f"{n} word " * n} for n in (90, 40, 1)])
    uncut, chunked = prepared(path), prepared(path, 32, excess_length="chunk")
    lengths = [len(ids) for ids in ids_of(chunked)]
    assert lengths == chunked.lengths and max(lengths) <= 32 and min(lengths[:-1]) >= 16
    assert sum(ids_of(chunked), []) == sum(ids_of(uncut), [])
    assert all(row["labels"][0] == -100 and row["labels"][1:] == row["input_ids"][1:] for row in chunked.train)
    assert chunked.report.trained_tokens == sum(label != -100 for row in chunked.train for label in row["labels"])
    assert (chunked.report.rows_used, chunked.report.rows_chunked, chunked.report.sequences) == (3, 2, len(lengths))
    assert "2 cut into chunks" in chunked.report.account()


@pytest.fixture
def files(write):
    """Two files of 10 rows each."""
    return [write(f"{name}.jsonl", [{"text": f"{name} {n}"} for n in range(10)]) for name in ("a", "b")]


def counts(prepared_data):
    texts = [TOKENIZER.decode(ids, skip_special_tokens=True).strip() for ids in ids_of(prepared_data)]
    return [sum(text.startswith(name) for text in texts) for name in ("a", "b")], texts


def test_weights_say_how_often_rows_are_used_and_every_row_is_counted(files):
    weighted = prepared(files, weights=[0.3, 2.5], seed=1)
    [from_a, from_b], texts = counts(weighted)
    assert (from_a, from_b) == (3, 25) and len({text for text in texts if text.startswith("b")}) == 10
    report = weighted.report
    assert (report.rows_read, report.rows_used, report.rows_left_out, report.rows_repeated) == (20, 13, 7, 15)
    assert "7 left out (dataset.weights)" in report.account() and "15 times a row is used again" in report.account()
    assert weighted.lengths == [len(ids) for ids in ids_of(weighted)] and report.total_tokens == sum(weighted.lengths)
    assert report.trained_tokens == sum(label != -100 for row in weighted.train for label in row["labels"])


def test_the_same_seed_chooses_the_same_rows_and_another_seed_others(files):
    first, repeated, other = (prepared(files, weights=[0.5, 1], seed=seed) for seed in (1, 1, 2))
    assert ids_of(first) == ids_of(repeated) and first.fingerprint == repeated.fingerprint
    assert counts(first)[1] != counts(other)[1] and first.fingerprint != other.fingerprint


def test_weights_are_one_for_each_path_and_not_for_held_out_rows(files):
    split_data = prepared(files, weights=[2, 2], test_split_size=4)
    assert len(split_data.eval) == 4 and len(split_data.train) == 32
    with pytest.raises(RecipeError, match=r"2 number\(s\) for 1 path"):
        prepared(files[0], weights=[1, 2])
    for weights in ([0, 1], [-1, 1], [101, 1]):
        with pytest.raises(RecipeError, match="weights"):
            prepared(files, weights=weights)
