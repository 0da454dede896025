"""Rows to train on and to hold out by the names of files, and in folders of `save_to_disk`.

Files of a folder or pattern that are named train, validation or test are read as that; test rows are never trained on.
"""

import itertools
import json
import random

import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict
from small_data import read_examples, recipe, talk

from finetune.errors import DataError

NAMES = ("train", "validation", "valid", "dev", "eval", "test")
HELD_OUT = ("validation", "valid", "dev", "eval")


@pytest.fixture
def folder(tmp_path):
    """folder({name: text of its row}) -> the path of a folder with these files."""

    def write(files):
        for name in files:
            path = tmp_path / "rows" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"prompt": f"in {name}", "completion": "yes"}) + "\n")
        return str(tmp_path / "rows")

    return write


def files_read(path, **settings):
    """The files whose rows are trained on, and those held out."""
    examples = read_examples(recipe(path, **settings).dataset)
    return tuple(
        [example.prompt.removeprefix("in ") for example in split.examples] if split else []
        for split in (examples.train, examples.eval)
    )


@pytest.mark.parametrize("held_out", HELD_OUT)
@pytest.mark.parametrize(
    "pattern", ["{}.jsonl", "my_{}.jsonl", "{}-00000-of-00001.jsonl", "data.{}.v2.jsonl", "{}/rows.jsonl", "data/{}-0.jsonl"]
)
def test_a_folder_is_read_by_the_names_of_its_files(folder, pattern, held_out):
    train, other, test = (pattern.format(name) for name in ("train", held_out, "test"))
    path = folder([train, other, test])
    assert files_read(path) == ([train], [other])
    assert files_read(f"{path}/**/*.jsonl") == ([train], [other])
    assert files_read(path, eval_split="test") == ([train], [test])
    assert files_read(path, split="test") == ([test], [])
    assert files_read(path, eval_path=f"{path}/{test}") == ([train], [test])


@pytest.mark.parametrize("files", ["rows rows_eval", "train more dev", "test", "train_test train"])
def test_names_that_do_not_say_it_are_asked_about(folder, files):
    with pytest.raises(DataError, match=r"some files are named for a split|no file is named for training") as error:
        files_read(folder([f"{name}.jsonl" for name in files.split()]))
    assert "dataset.eval_path" in error.value.fix


def test_no_mixture_of_names_trains_on_held_out_or_test_rows(folder, tmp_path):
    generator = random.Random(0)
    forms = ["{}.jsonl", "{}_1.jsonl", "a-{}.jsonl", "{}/a.jsonl", "{}Set.jsonl", "sub_{}/b.jsonl"]
    cases = [(form, names) for form in forms for count in (2, 3) for names in itertools.combinations(NAMES, count)]
    for number, (form, names) in enumerate(generator.sample(cases, 60)):
        files = [f"../{number}/{form.format(name)}" for name in names]
        folder(files)
        try:
            trained, _ = files_read(str(tmp_path / str(number)))
        except DataError as error:
            assert error.fix
            continue
        assert trained == [file for file in files if "train" in file], (form, names)


ROWS = [{"prompt": f"Question {n}", "completion": f"Answer {n}"} for n in range(7)]
TRAIN, TEST = ROWS[:5], ROWS[5:]


def prompts(rows):
    return [example.prompt for example in rows.examples]


def prompts_of_splits(path, **settings):
    examples = read_examples(recipe(str(path), **settings).dataset)
    return prompts(examples.train), examples.eval and prompts(examples.eval)


EXPECTED_PROMPTS = [row["prompt"] for row in TRAIN], [row["prompt"] for row in TEST]


def test_arrow_files_are_read_and_a_damaged_one_is_named(tmp_path):
    path, table = tmp_path / "rows.arrow", pa.Table.from_pylist([talk(f"{n}?", "a") for n in range(7)])
    for opened in (pa.ipc.new_stream, pa.ipc.new_file):  # as datasets writes it, and Arrow's file format
        with pa.OSFile(str(path), "wb") as file, opened(file, table.schema) as writer:
            for batch in table.to_batches(max_chunksize=3):
                writer.write_batch(batch)
        rows = read_examples(recipe(str(path)).dataset).train
        assert [example.messages[0]["content"] for example in rows.examples] == [f"{n}?" for n in range(7)], opened
        content = path.read_bytes()
        for damaged in (content[: len(content) // 2], content[:20], b"not arrow at all"):
            path.write_bytes(damaged)
            with pytest.raises(DataError, match=r"rows\.arrow: can't be read as Arrow"):
                read_examples(recipe(str(path)).dataset)


def test_a_folder_of_save_to_disk_is_read_in_its_order_and_of_named_splits_those_that_are_chosen(tmp_path):
    Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=3)
    assert prompts_of_splits(tmp_path / "saved") == ([row["prompt"] for row in ROWS], None)
    next((tmp_path / "saved").glob("*.arrow")).unlink()
    with pytest.raises(DataError, match="one is missing"):
        prompts_of_splits(tmp_path / "saved")
    path = tmp_path / "splits"
    DatasetDict({"train": Dataset.from_list(TRAIN), "test": Dataset.from_list(TEST)}).save_to_disk(path)
    (path / "dataset_dict.json").write_text('{"splits": ["train", 1, "test", "train"]}')
    with pytest.raises(DataError, match="the splits train, test") as error:
        prompts_of_splits(path)
    assert "dataset.eval_split=test" in error.value.fix
    assert prompts_of_splits(path, eval_split="test") == EXPECTED_PROMPTS
    assert prompts_of_splits(path, split="test") == (EXPECTED_PROMPTS[1], None)
    with pytest.raises(DataError, match="has no split dev; it has train, test"):
        prompts_of_splits(path, eval_split="dev")


def test_a_json_file_of_several_splits_is_refused(write):
    path = write("rows.json", json.dumps({"train": TRAIN, "test": TEST, "version": 1}))
    for settings in ({}, {"split": "train"}, {"eval_split": "test"}):
        with pytest.raises(DataError, match="the splits train, test") as error:
            prompts_of_splits(path, **settings)
        assert "jq -c '.train[]'" in error.value.fix
