"""A base model is found after a move or by a link, if it is the one trained on; in the hub's cache, the hub is not asked."""

import json
import os
import shutil
import warnings

import pytest
from conftest import flip_one_byte

from finetune.bundled import model_path
from finetune.data.tokenizer import load_tokenizer
from finetune.errors import CommandError, ModelError, RecipeError
from finetune.model.build import build_on_meta
from finetune.model.configuration import read_config
from finetune.model.transformers_config import load_config
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


def test_a_link_at_the_old_path_leads_to_a_moved_model_and_another_one_is_refused_by_its_hash(project, home, finetune):
    run, folder = project(), home / "project" / "mymodel"
    folder.rename(home / "moved model")
    folder.symlink_to(home / "moved model")
    assert finetune("merge", run.path)[0] == 0 and (run.path / "merged").is_dir()
    assert finetune("chat", run.path, "--prompt", "Hello", "--max-new-tokens", "2")[0] == 0
    flip_one_byte(home / "moved model" / "model.safetensors")
    with pytest.raises(CommandError, match=r"with .*/mymodel: .*weights have changed: [0-9a-f]{12}, now [0-9a-f]{12}"):
        require_own_adapter(run, run.adapter)


def test_model_and_adapter_are_looked_for_in_the_working_folder_then_beside_the_recipe_or_there_is_none(home):
    with pytest.raises(RecipeError, match=f"there is no folder {home}/mymodel"):
        read_config(load_recipe("tiny-cpu", ["model_name_or_path=mymodel"]))
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


@pytest.mark.slow
@pytest.mark.parametrize("offline", ["0", "1"])
def test_no_save_asks_for_the_base_models_vocabulary(make_run, train, cached_model, tmp_path, offline):
    asked = tmp_path / "asked"

    def on_a_machine_with_a_network():
        import peft.utils.other

        os.environ["HF_HUB_OFFLINE"] = offline  # which PEFT reads, the others have read it
        peft.utils.other.file_exists = lambda *_, **__: asked.touch()
        warnings.filterwarnings("error", message="Could not find a config file")

    run = make_run("model_name_or_path=owner/name", "max_steps=2")
    assert train(run, on_a_machine_with_a_network) == 0, run.log.read_text()[-2000:]
    assert (run.path / "adapter").is_dir() and not asked.exists()


#: A model's own code.
CODE = """
from transformers import LlamaConfig, LlamaForCausalLM
class Config(LlamaConfig): model_type = "own_type"
class Model(LlamaForCausalLM): config_class, commit = Config, "{}"
"""


@pytest.mark.slow
def test_trusted_code_is_the_pinned_commits_after_a_newer_one_and_its_errors_have_a_fix(cached_model, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    pinned, newest = cached_model, cached_model.with_name("b" * 40)
    own = {"model_type": "own_type", "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}}
    (pinned / "config.json").write_text(json.dumps(json.loads((pinned / "config.json").read_text()) | own))
    shutil.copytree(pinned, newest)
    for snapshot in (pinned, newest):
        (snapshot / "code.py").write_text(CODE.format(snapshot.name[0]))
    (pinned.parents[1] / "refs" / "main").write_text(newest.name)
    recipe = load_recipe(
        "tiny-cpu", ["model_name_or_path=owner/name", "trust_remote_code=true", f"model_revision={pinned.name}"]
    )
    assert build_on_meta(load_config(recipe), None, dtype=None, attention="sdpa").commit == "a"
    (pinned / "code.py").write_text("import no_such_package")
    with pytest.raises(RecipeError, match="no_such_package"):
        load_config(recipe)

    def ask(*_, revision, **__):
        raise OSError(f"asked for {revision}")

    monkeypatch.setattr("transformers.dynamic_module_utils.get_cached_module_file", ask)
    (pinned / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["other/repo--code.T", None]}}))
    with pytest.raises(ModelError, match=f"asked for {pinned.name}"):
        load_tokenizer(recipe)
