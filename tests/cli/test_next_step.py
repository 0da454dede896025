"""What a short answer says about the next step."""

import pytest

from finetune.cli.plan import show_plan
from finetune.cli.run import stop_all
from finetune.errors import RecipeError
from finetune.recipe import load_recipe
from finetune.run.directory import open_run


def test_without_runs_the_named_recipe_is_a_shipped_one(tmp_path):
    with pytest.raises(RecipeError) as raised:
        open_run("latest", tmp_path)
    load_recipe(raised.value.fix.split()[-1])


def test_a_data_file_in_place_of_a_recipe_is_told_how_to_be_read(tmp_path):
    (tmp_path / "rows.json").write_text('[{"instruction": "Say hi", "output": "hi"}]')
    with pytest.raises(RecipeError) as raised:
        load_recipe(str(tmp_path / "rows.json"))
    assert raised.value.fix == f"If it is data: finetune data tiny-cpu dataset.path={tmp_path / 'rows.json'}"


def test_stop_all_says_when_nothing_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert stop_all(as_json=False) == 0
    assert capsys.readouterr().out == "No run is running.\n"


def _plan_of(*overrides, free, capsys):
    show_plan("tiny-cpu", list(overrides), model=None, data=None, gpu="rtx-3060", free=free, as_json=False)
    return " ".join(capsys.readouterr().out.split())


def test_a_bare_free_is_gib_and_a_lower_budget_is_named_beside_the_verdict(capsys):
    assert "memory_budget is 5.00 GiB of the 8.00 GiB free" in _plan_of("memory_budget=5", free="8", capsys=capsys)
