"""Files of a folder or pattern that are named train, validation or test are read as that; test rows are never trained on."""

import itertools
import json
import random

import pytest
from small_data import advised, read_examples, recipe

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


@pytest.mark.parametrize(
    ("files", "trained", "held_out"),
    [
        (["rows.jsonl", "rows_eval.jsonl"], ["rows.jsonl"], ["rows_eval.jsonl"]),
        (["train.jsonl", "more.jsonl", "dev.jsonl"], ["more.jsonl", "train.jsonl"], ["dev.jsonl"]),
        (["test.jsonl"], ["test.jsonl"], []),
        (["train_test.jsonl", "train.jsonl"], ["train.jsonl"], []),
    ],
)
def test_names_that_do_not_say_it_are_asked_about_and_the_answer_works(folder, files, trained, held_out):
    path = folder(files)
    with pytest.raises(DataError) as error:
        files_read(path)
    [settings] = advised(error.value.fix)
    assert files_read(settings.pop("path"), **settings) == (trained, held_out)


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
