"""A base model in a folder is found after a move with its project, or by a link, if it is the model trained on."""

import json
import shutil

import pytest
from conftest import flip_one_byte

from finetune.bundled import model_path
from finetune.errors import CommandError, RecipeError
from finetune.model.configuration import read_config
from finetune.planner.plan import read_plan
from finetune.recipe import load_recipe
from finetune.run.directory import RunDirectory
from finetune.run.prepare import create_run, prepare
from finetune.run.seal import require_own_adapter

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
def test_a_missing_base_is_a_missing_folder_and_the_command_that_links_its_new_path(project, home, finetune, command):
    run = project("stopped" if command == "resume" else "finished")
    shutil.rmtree(home / "project" / "mymodel")
    code, output = finetune(command, run.path)
    missing = f"the base model's folder is missing: {home}/project/mymodel"
    assert code == 2 and missing in output and f"ln -s NEW_FOLDER {home}/project/mymodel" in output and "hub" not in output


def test_a_link_at_the_old_path_leads_to_a_moved_model(project, home, finetune):
    run, folder = project(), home / "project" / "mymodel"
    folder.rename(home / "moved model")
    folder.symlink_to(home / "moved model")
    assert finetune("merge", run.path)[0] == 0 and (run.path / "merged").is_dir()
    assert finetune("chat", run.path, "--prompt", "Hello", "--max-new-tokens", "2")[0] == 0


def test_another_model_is_refused_by_its_hash(project, home):
    run, folder, other = project(), home / "project" / "mymodel", home / "other"
    folder.rename(other)
    flip_one_byte(other / "model.safetensors")
    folder.symlink_to(other)
    with pytest.raises(CommandError, match=r"with .*/mymodel: .*weights have changed: [0-9a-f]{12}, now [0-9a-f]{12}"):
        require_own_adapter(run, run.adapter)


def test_a_name_that_is_no_folder_says_so(home):
    with pytest.raises(RecipeError, match=f"there is no folder {home}/mymodel"):
        read_config(load_recipe("tiny-cpu", ["model_name_or_path=mymodel"]))
