"""A base model in a folder is found after a move, or by its new path, if it is the model that the run was trained on."""

import json
import shutil

import pytest
from conftest import flip_one_byte

from finetune.bundled import model_path
from finetune.errors import CommandError, ModelError, RecipeError
from finetune.model.configuration import read_config
from finetune.planner.plan import read_plan
from finetune.recipe import load_recipe
from finetune.run.directory import RunDirectory
from finetune.run.fingerprint import require_base
from finetune.run.prepare import create_run, prepare
from finetune.run.state import read_state

RECIPE = "model_name_or_path: mymodel\nadapter_name_or_path: first\ndataset: support\n"


@pytest.fixture
def project(home, kept_run):
    """project(name) -> a run in home/project, trained on the model in home/project/mymodel."""

    def make(name="finished"):
        shutil.copytree(model_path("tiny"), home / "project" / "mymodel")
        run = RunDirectory(kept_run(home / "project" / "runs", name))
        values = json.loads(run.plan.read_text())
        values["plan"]["model_name_or_path"], values["base_folder"] = "mymodel", str(home / "project" / "mymodel")
        run.plan.write_text(json.dumps(values))
        return run

    return make


def base_of(run):
    return read_plan(run.plan).settings.model_name_or_path


def test_model_and_adapter_are_looked_for_in_the_working_folder_then_beside_the_recipe(home):
    project = home / "project"
    for name in ("mymodel", "first"):
        (project / name).mkdir(parents=True)
    (project / "recipe.yaml").write_text(RECIPE)
    recipe = load_recipe(project / "recipe.yaml")
    assert (recipe.model_name_or_path, recipe.adapter_name_or_path) == (str(project / "mymodel"), str(project / "first"))
    (home / "mymodel").mkdir()
    assert load_recipe(project / "recipe.yaml").model_name_or_path == "mymodel"
    (project / "tiny").mkdir()
    assert load_recipe(project / "recipe.yaml", ["model_name_or_path=tiny"]).model_name_or_path == "tiny"


def test_a_run_keeps_its_models_folder_as_given_and_as_absolute(home, monkeypatch):
    shutil.copytree(model_path("tiny"), home / "mymodel")
    small = ["max_steps=1", "dataset.max_rows=16", "output_dir=runs/one"]
    run = create_run(prepare(load_recipe("tiny-cpu", ["model_name_or_path=mymodel", *small])))
    values = json.loads(run.plan.read_text())
    assert (values["plan"]["model_name_or_path"], values["base_folder"]) == ("mymodel", str(home / "mymodel"))
    assert base_of(run) == "mymodel"
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    assert base_of(RunDirectory(home / "runs" / "one")) == str(home / "mymodel")


def test_a_moved_project_is_found_from_any_folder(project, home):
    name = project().path.name
    (home / "project").rename(home / "moved")
    assert base_of(RunDirectory(home / "moved" / "runs" / name)) == str(home / "moved" / "mymodel")


@pytest.mark.parametrize("command", ["eval", "chat", "merge", "serve", "resume"])
def test_a_missing_base_is_a_missing_folder_and_the_command_for_its_new_path(project, home, finetune, command):
    run = project("stopped" if command == "resume" else "finished")
    shutil.rmtree(home / "project" / "mymodel")
    code, output = finetune(command, run.path)
    missing = f"the base model's folder is missing: {home}/project/mymodel"
    assert code == 2 and missing in output and "--model FOLDER" in output and "hub" not in output


def test_a_new_path_is_remembered_and_leaves_the_order_of_the_runs(project, home, finetune):
    run, moved = project(), home / "moved model"
    before = run.plan.stat().st_mtime_ns
    (home / "project" / "mymodel").rename(moved)
    assert finetune("merge", run.path, "--model", "moved model")[0] == 0 and (run.path / "merged").is_dir()
    assert run.plan.read_text().count("checksum") == 1
    assert base_of(run) == str(moved) and run.plan.stat().st_mtime_ns == before
    assert finetune("chat", run.path, "--prompt", "Hello", "--max-new-tokens", "2")[0] == 0


def test_another_model_is_refused_by_its_hash(project, home):
    run, other = project(), home / "other"
    (home / "project" / "mymodel").rename(other)
    flip_one_byte(other / "model.safetensors")
    with pytest.raises(CommandError, match=r"with .*/other: .*weights have changed: [0-9a-f]{12}, now [0-9a-f]{12}"):
        require_base(run, str(other))
    assert base_of(run) == str(home / "project" / "mymodel")
    with pytest.raises(ModelError, match=f"is missing: {home}/nowhere"):
        require_base(run, "nowhere")


def test_without_a_checkpoint_there_is_no_hash_to_compare(project, home):
    run = project()
    for folder in (run.adapter, run.checkpoints):
        shutil.rmtree(folder)
    with pytest.raises(CommandError, match="no checkpoint yet") as error:
        require_base(run, str(home / "project" / "mymodel"))
    assert "finetune run" in error.value.fix


@pytest.mark.slow
def test_a_run_resumes_on_its_base_at_a_new_path(project, home, finetune):
    run = project("stopped")
    (home / "project" / "mymodel").rename(home / "moved")
    code, output = finetune("resume", run.path, f"model_name_or_path={home / 'moved'}")
    assert code == 0 and f"from now on model_name_or_path={home / 'moved'}" in output, output
    assert read_state(run).state == "finished" and "from checkpoint-2; resuming is bit-exact" in output
    assert base_of(run) == str(home / "moved")


def test_a_name_that_is_no_folder_says_so(home):
    with pytest.raises(RecipeError, match=f"there is no folder {home}/mymodel"):
        read_config(load_recipe("tiny-cpu", ["model_name_or_path=mymodel"]))
