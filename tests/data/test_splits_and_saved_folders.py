"""Rows in Arrow files, in folders of `save_to_disk`, and training and held-out rows in one file."""

import json

import pytest
from small_data import advised, read_examples, recipe, talk

from finetune.errors import DataError

ROWS = [{"prompt": f"Question {n}", "completion": f"Answer {n}"} for n in range(7)]
TRAIN, TEST = ROWS[:5], ROWS[5:]


def prompts(rows):
    return [example.prompt for example in rows.examples]


def prompts_of_splits(path, **settings):
    examples = read_examples(recipe(str(path), **settings).dataset)
    return prompts(examples.train), examples.eval and prompts(examples.eval)


EXPECTED_PROMPTS = [row["prompt"] for row in TRAIN], [row["prompt"] for row in TEST]


@pytest.fixture
def arrow(tmp_path):
    """arrow(rows, name) -> a file as datasets writes it (a stream), or in Arrow's file format."""
    import pyarrow as pa

    def write(rows, name="rows.arrow", opened=pa.ipc.new_stream):
        table = pa.Table.from_pylist(rows)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with pa.OSFile(str(tmp_path / name), "wb") as file, opened(file, table.schema) as writer:
            for batch in table.to_batches(max_chunksize=3):
                writer.write_batch(batch)
        return tmp_path / name

    return write


@pytest.mark.parametrize("kind", ["new_stream", "new_file"])
def test_arrow_files_are_read(arrow, kind):
    import pyarrow as pa

    path = arrow([talk(f"{n}?", "a") for n in range(7)], opened=getattr(pa.ipc, kind))
    rows = read_examples(recipe(str(path)).dataset).train
    assert [example.messages[0]["content"] for example in rows.examples] == [f"{n}?" for n in range(7)]


def test_a_damaged_arrow_file_is_named(arrow):
    path = arrow(ROWS)
    content = path.read_bytes()
    for damaged in (content[: len(content) // 2], content[:20], b"not arrow at all"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"rows\.arrow: can't be read as Arrow"):
            read_examples(recipe(str(path)).dataset)


def test_a_folder_of_save_to_disk_is_read_in_its_order(tmp_path):
    from datasets import Dataset

    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=3)
    assert prompts_of_splits(tmp_path / "saved") == ([row["prompt"] for row in ROWS], None)
    next((tmp_path / "saved").glob("*.arrow")).unlink()
    with pytest.raises(DataError, match="one is missing"):
        prompts_of_splits(tmp_path / "saved")


@pytest.mark.parametrize("kind", ["saved dictionary", "JSON"])
def test_of_named_splits_one_is_trained_on_and_another_held_out_where_they_are_chosen(tmp_path, write, kind):
    from datasets import Dataset, DatasetDict

    path = tmp_path / "saved"
    if kind == "JSON":
        path = write("rows.json", json.dumps({"train": TRAIN, "test": TEST, "version": 1}))
    else:
        DatasetDict({"train": Dataset.from_list(TRAIN), "test": Dataset.from_list(TEST)}).save_to_disk(path)
    with pytest.raises(DataError, match="the splits train, test") as error:
        prompts_of_splits(path)
    assert "dataset.eval_split=test" in error.value.fix
    assert prompts_of_splits(path, eval_split="test") == EXPECTED_PROMPTS
    assert prompts_of_splits(path, split="test") == (EXPECTED_PROMPTS[1], None)
    with pytest.raises(DataError, match="has no split dev; it has train, test"):
        prompts_of_splits(path, eval_split="dev")


@pytest.mark.parametrize("held_out", ["validation", "dev", "test"])
def test_a_column_that_says_the_split_holds_rows_out_or_stops_the_run(write, held_out):
    path = write("rows.jsonl", [{**row, "split": "train" if n < 5 else held_out} for n, row in enumerate(ROWS)])
    assert prompts_of_splits(path, split="train") == (EXPECTED_PROMPTS[0], None)
    with pytest.raises(DataError, match="'split' is not used, and it looks like a split of the rows: 2 row") as error:
        prompts_of_splits(path)
    assert prompts_of_splits(path, **advised(error.value.fix)[0]) == EXPECTED_PROMPTS
    assert prompts_of_splits(path, ignore_columns=["split"])[0] == [row["prompt"] for row in ROWS]
