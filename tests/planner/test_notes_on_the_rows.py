"""A plan and a run say how the rows were read: columns that are not used, files chosen by name, rows that were not read."""

import json

import pytest

from finetune.cli.run import _print_start
from finetune.planner.planning import read_rows
from finetune.recipe import recipe_from
from finetune.run.directory import RunDirectory
from finetune.run.prepare import prepare


@pytest.fixture
def recipe(tmp_path):
    for split in ("train", "valid", "test"):
        rows = [{"instruction": f"{split} {n}", "output": f"Done {n}.", "id": n, "source": "web"} for n in range(40)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def make(**settings):
        return recipe_from({"model_name_or_path": "tiny", "gpu": "cpu", "dataset": {"path": str(tmp_path)}, **settings})

    return make


@pytest.mark.parametrize("path", ["http://example.com/x", "s3://bucket/rows", "file:///etc/passwd", "-", "a b"])
def test_what_is_neither_a_path_nor_a_dataset_of_the_hub_is_a_problem_of_the_data(recipe, path):
    assert read_rows(recipe(dataset=path)).problem


@pytest.mark.parametrize("path", ["rows.jsonl", "/elsewhere/rows", "owner/name", "../rows"])
def test_rows_of_another_machine_are_planned_without_them(recipe, path):
    rows = read_rows(recipe(dataset=path))
    assert rows.problem is None and "is not on this machine" in rows.notes[0]


def test_a_plan_lists_unused_columns_files_chosen_by_name_and_rows_not_read_for_lack_of_a_tokenizer(recipe):
    names, columns = read_rows(recipe()).notes
    assert columns == "columns not used: id, source"
    assert names.endswith("are used by name: train.jsonl to train on; valid.jsonl held out; test.jsonl not read")
    [note] = read_rows(recipe(model_name_or_path="someone/not-here")).notes
    assert "the rows were not read, because the model's tokenizer can't be: " in note


@pytest.mark.slow
def test_a_run_lists_unused_columns_when_it_starts(recipe, tmp_path, capsys):
    prepared = prepare(recipe(output_dir=str(tmp_path / "run"), max_steps=1))
    _print_start(RunDirectory(tmp_path / "run"), prepared)
    text = capsys.readouterr().out
    assert "Training data: columns not used: id, source" in text and "Held-out data: columns not used: id, source" in text
