"""Training a model of the hub's cache asks the hub nothing."""

import json
import os
import shutil
import warnings

import pytest

from finetune.data.tokenizer import load_tokenizer
from finetune.errors import ModelError, RecipeError
from finetune.model.build import build_on_meta
from finetune.model.transformers_config import load_config
from finetune.recipe import load_recipe

pytestmark = pytest.mark.slow


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
