"""A run directory with a damaged or missing part: one screen that names it, exit code 2, and the other runs are listed."""

import json
import shutil

import pytest

from finetune.files import write_manifest
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
def answer(run_path, home, finetune):
    """answer(break_it, *command) -> exit code and the JSON that a command about a broken copy of the run printed."""

    def ask(break_it, *command):
        shutil.copytree(run_path, home / "runs" / "broken")
        break_it(home / "runs" / "broken")
        code, shown = finetune(*command, "broken", "--json")
        return code, json.loads(shown.out)

    return ask


def no_plan(run):
    (run / "plan.json").write_text("{}")


@pytest.mark.parametrize(
    ("break_it", "command", "problem", "fix"),
    [(no_plan, ["resume"], "plan.json can't be read", "recipe.yaml"),
     (no_plan, ["eval"], "plan.json can't be read", "recipe.yaml"),
     (lambda run: shutil.rmtree(run / "data"), ["resume"], "data is missing", ""),
     (lambda run: shutil.rmtree(run / "data"), ["chat", "--prompt", "x"], "data is missing", ""),
     (lambda run: None, ["chat", "--prompt", "x"], "adapter in runs/broken/adapter can't be loaded", "")],
    ids=["plan, resume", "plan, eval", "rows, resume", "rows, chat", "adapter"],
)  # fmt: skip
def test_the_damaged_part_is_named(answer, break_it, command, problem, fix):
    code, error = answer(break_it, *command)
    assert code == 2 and problem in error["problems"][0] and fix in error["fix"]


def test_events_that_are_no_file_do_not_hide_the_other_runs(run_path, home, finetune):
    for name in ("one", "two"):
        shutil.copytree(run_path, home / "runs" / name)
    (home / "runs/one/events.jsonl").mkdir()
    code, shown = finetune("runs", "--json")
    assert code == 0 and len(json.loads(shown.out)) == 2
