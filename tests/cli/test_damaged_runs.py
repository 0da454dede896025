"""A run directory with a damaged or missing part: one screen that names it, exit code 2, and the other runs are listed."""

import json
import shutil

import pytest

from finetune.manifest import write_manifest
from finetune.recipe import load_recipe
from finetune.run.prepare import create_run, prepare

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_path(tmp_path_factory):
    """A run that was stopped, with an adapter that is none."""
    path = tmp_path_factory.mktemp("made") / "run"
    run = create_run(prepare(load_recipe("tiny-cpu", ["dataset.max_rows=16", "max_steps=2", f"output_dir={path}"])))
    run.adapter.mkdir()
    (run.adapter / "adapter_config.json").write_text("{}")
    write_manifest(run.adapter, {})
    return run.path


@pytest.fixture
def answer(run_path, tmp_path, monkeypatch, finetune):
    """answer(break_it, *command) -> exit code and the JSON that a command about a broken copy of the run printed."""
    monkeypatch.chdir(tmp_path)

    def ask(break_it, *command):
        shutil.copytree(run_path, tmp_path / "runs" / "broken")
        break_it(tmp_path / "runs" / "broken")
        code, shown = finetune(*command, "broken", "--json")
        return code, json.loads(shown.out)

    return ask


@pytest.mark.parametrize("command", ["resume", "eval"])
def test_a_damaged_plan(answer, command):
    code, error = answer(lambda run: (run / "plan.json").write_text("{}"), command)
    assert code == 2 and "plan.json can't be read" in error["problems"][0] and "recipe.yaml" in error["fix"]


@pytest.mark.parametrize("command", [("resume",), ("chat", "--prompt", "x")])
def test_rows_that_are_gone(answer, command):
    code, error = answer(lambda run: shutil.rmtree(run / "data"), *command)
    assert code == 2 and "data is missing" in error["problems"][0]


def test_a_damaged_adapter(answer):
    code, error = answer(lambda run: None, "chat", "--prompt", "x")
    assert code == 2 and "adapter can't be loaded" in error["problems"][0].replace("in runs/broken/", "")


def test_events_that_are_no_file_do_not_hide_the_other_runs(run_path, tmp_path, monkeypatch, finetune):
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        shutil.copytree(run_path, tmp_path / "runs" / name)
    (tmp_path / "runs/one/events.jsonl").mkdir()
    code, shown = finetune("runs", "--json")
    assert code == 0 and len(json.loads(shown.out)) == 2
