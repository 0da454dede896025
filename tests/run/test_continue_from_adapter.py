"""Training on from an adapter: it starts as the first run ended, with its rank and layers, and nothing else goes unsaid."""

import json
import shutil

import pytest
import torch
from child_faults import killed_before_seal
from conftest import adapter_hash, events_of, flip_one_byte, manifest
from safetensors.torch import load_file, save_file

from finetune.bundled import model_path
from finetune.errors import RecipeError
from finetune.events import Evaluation, Result
from finetune.files import write_manifest
from finetune.planner.plan import read_plan
from finetune.recipe import load_recipe
from finetune.recipe.complete import complete
from finetune.run.base_adapter import base_adapter_of, require_usable_adapter
from finetune.run.directory import RunDirectory
from finetune.run.state import read_state
from finetune.settings import resolve_plain


@pytest.fixture(scope="module")
def make(make_run):
    """make(*overrides) -> a run that evaluates."""
    return lambda *overrides: make_run("sample_answers=0", "eval_steps=3", *overrides)


@pytest.fixture(scope="module")
def first(make, train):
    return train.whole(make("max_steps=6", "lora_alpha=24"))


@pytest.fixture
def foreign(tmp_path):
    """foreign(**changes) -> a folder with the configuration of another program's adapter."""

    def write(**changes):
        values = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["v_proj", "q_proj"], "bias": "none",
                  "base_model_name_or_path": "other/base", "use_dora": False, "rank_pattern": {}}  # fmt: skip
        (tmp_path / "adapter").mkdir(exist_ok=True)
        (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(values | changes))
        return tmp_path / "adapter"

    return write


OPEN = ("lora_r=auto", "lora_alpha=auto", "target_modules=auto", "load_in_4bit=auto")


def test_rank_scale_and_layers_are_the_adapters_and_each_disagreement_is_reported(foreign):
    folder = foreign(use_rslora=True)
    recipe, _, reasons = complete(load_recipe("tiny-cpu", [*OPEN, f"adapter={folder}"]))
    assert (recipe.lora_r, recipe.lora_alpha, recipe.target_modules, recipe.use_rslora) == (4, 8.0, ["q_proj", "v_proj"], True)
    assert set(reasons) == {"lora_r", "lora_alpha", "target_modules", "use_dora", "use_rslora"}
    equal_settings = ["lora_r=4", "lora_alpha=8", "target_modules=[v_proj,q_proj]", "use_rslora=true"]
    assert complete(load_recipe("tiny-cpu", [*equal_settings, f"adapter={folder}"]))[0].lora_r == 4
    with pytest.raises(RecipeError) as refused:
        complete(load_recipe("tiny-cpu", [f"adapter={folder}", "lora_r=16", "use_dora=true"]))
    assert len(refused.value.problems) == 4 and "Leave out lora_r, lora_alpha, target_modules, use_dora" in refused.value.fix
    assert complete(load_recipe("tiny-cpu"))[2] == {}


@pytest.mark.parametrize(
    "changes",
    [{"peft_type": "IA3"}, {"modules_to_save": ["lm_head"]}, {"rank_pattern": {"q_proj": 2}}, {"bias": "all"}, {"r": None}],
)
def test_an_adapter_that_is_not_trained_here_is_refused(foreign, changes):
    with pytest.raises(RecipeError, match="finetune can't continue an adapter with"):
        complete(load_recipe("tiny-cpu", [*OPEN, f"adapter={foreign(**changes)}"]))


def test_what_is_no_adapter_is_named(foreign, tmp_path):
    with pytest.raises(RecipeError, match="nowhere is neither a run nor a folder"):
        complete(load_recipe("tiny-cpu", ["adapter=nowhere"]))
    recipe = load_recipe("tiny-cpu", [f"adapter={tmp_path}"])
    for name in ("plan", "adapter_config"):
        (foreign() / f"{name}.json").write_text("{")
        with pytest.raises(RecipeError, match=rf"{name}\.json can't be read"):
            complete(recipe)
    (foreign() / "adapter_config.json").unlink()
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(RecipeError, match="has no adapter yet"):
        complete(recipe)


def test_without_a_hash_another_name_on_the_hub_is_refused_and_a_folder_of_another_machine_is_not(foreign):
    folder = foreign()
    save_file({"lora_B": torch.zeros(4)}, folder / "adapter_model.safetensors")
    settings = resolve_plain(load_recipe("tiny-cpu", [f"adapter={folder}"]))
    with pytest.raises(RecipeError, match="other base weights: other/base, and the recipe has tiny"):
        require_usable_adapter(settings)
    foreign(base_model_name_or_path="/models/somewhere")
    require_usable_adapter(settings)


@pytest.mark.parametrize("recorded", ["tinybase", "./tinybase", "tinybase/"])
def test_a_folder_is_the_same_base_model_however_it_is_spelt(foreign, recorded, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model_path("tiny"), tmp_path / "tinybase")
    folder = foreign(base_model_name_or_path=recorded)
    save_file({"lora_B": torch.zeros(4)}, folder / "adapter_model.safetensors")
    settings = resolve_plain(load_recipe("tiny-cpu", ["model_name_or_path=./tinybase", f"adapter={folder}"]))
    require_usable_adapter(settings)
    shutil.copytree(tmp_path / "tinybase", tmp_path / "other")
    flip_one_byte(tmp_path / "other" / "model.safetensors")
    with pytest.raises(RecipeError, match="other base weights"):
        require_usable_adapter(settings.model_copy(update={"model_name_or_path": "./other"}))


@pytest.mark.slow
def test_held_out_loss_before_the_first_step_is_the_first_runs_best(first, make, train):
    second = make("max_steps=6", f"adapter={first.path}", "lora_r=auto", "lora_alpha=auto", "target_modules=auto")
    assert read_plan(second.plan).settings.lora_alpha == 24.0
    assert read_plan(second.plan).forecast.peaks == read_plan(first.plan).forecast.peaks
    assert read_plan(second.plan).reasons["lora_r"].startswith("from the continued adapter")
    train.whole(second)
    (result,) = events_of(first, Result)
    losses = {event.step: event.eval_loss for event in events_of(second, Evaluation)}
    assert losses[0] == result.eval_loss and losses[6] != losses[0]
    facts = base_adapter_of(second)
    assert (facts.name, facts.step, facts.eval_loss) == (str(first.path), result.step, result.eval_loss)
    assert facts.base == manifest(second.adapter)["facts"]["base"]
    assert manifest(second.checkpoints / "checkpoint-6")["facts"]["origin"]


@pytest.mark.slow
def test_killed_and_without_its_first_run_it_resumes_bit_exactly(first, make, train, tmp_path):
    moved = tmp_path / "first"
    shutil.copytree(first.path, moved)
    whole = make(f"adapter={moved}", "lora_alpha=24")
    run = RunDirectory(tmp_path / "again")
    shutil.copytree(whole.path, run.path)
    train.whole(whole)
    shutil.rmtree(moved)
    assert train(run, killed_before_seal(6)) == 137
    train.whole(run)
    assert adapter_hash(run) == adapter_hash(whole)
    assert [event.step for event in events_of(run, Evaluation)].count(0) == 1


@pytest.mark.slow
def test_where_training_on_only_makes_it_worse_the_result_is_what_it_began_with(first, make, train):
    worse = train.whole(make("max_steps=3", "learning_rate=0.5", "lora_alpha=24", f"adapter={first.path}"))
    (result,) = events_of(worse, Result)
    assert (result.step, result.last_step) == (0, 3) and result.last_eval_loss > result.eval_loss
    assert adapter_hash(worse) == adapter_hash(first)
    assert "best at step 0 of 3, the adapter that training continued from" in read_state(worse).message


@pytest.mark.slow
def test_another_base_and_a_changed_adapter_are_refused(first, make, train, tmp_path):
    shutil.copytree(model_path("tiny"), tmp_path / "base")
    weights = load_file(tmp_path / "base" / "model.safetensors")
    weights[next(iter(weights))] *= 2
    save_file(weights, tmp_path / "base" / "model.safetensors", {"format": "pt"})
    with pytest.raises(RecipeError, match="was trained on other base weights"):
        make(f"model_name_or_path={tmp_path}/base", "lora_alpha=24", f"adapter={first.path}")
    run = make("max_steps=2", "lora_alpha=24", f"adapter={first.path}")
    tensors = load_file(run.base_adapter / "adapter_model.safetensors")
    save_file({name: values[:2] if "lora_A" in name else values for name, values in tensors.items()},
              run.base_adapter / "adapter_model.safetensors")  # fmt: skip
    assert train(run) == 2 and "bytes, not the" in read_state(run).message
    write_manifest(run.base_adapter, {})
    assert train(run) == 2 and "does not fit the model" in read_state(run).message
    settings = read_plan(run.plan).settings
    (first.adapter / "adapter_model.safetensors").open("ab").write(b"x")
    with pytest.raises(RecipeError, match="bytes, not the"):
        require_usable_adapter(settings)
