"""`finetune plan MODEL` and `--model`, `--data`: the recipe that they stand for."""

import json

import pytest

from finetune.cli.plan import show_plan
from finetune.cli.source import recipe_of, require_dataset
from finetune.errors import RecipeError
from finetune.recipe import NO_DATASET


def test_a_models_name_or_a_folder_with_only_a_config_is_the_default_recipe_with_it(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for source in ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b-instruct", "someone/their-model", str(tmp_path)):
        recipe = recipe_of(source, ["lora_r=8"])
        assert (recipe.model_name_or_path, recipe.lora_r, recipe.dataset.path) == (source, 8, NO_DATASET)


@pytest.mark.parametrize("as_model", [True, False])
def test_an_adapter_a_run_or_a_gguf_file_is_no_model_and_the_next_command_is_named(tmp_path, as_model):
    adapter = tmp_path / "runs" / "x" / "adapter"
    adapter.mkdir(parents=True)
    (adapter / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')
    (adapter.parent / "plan.json").write_text("{}")
    (tmp_path / "x.gguf").write_bytes(b"GGUF\x03\x00")
    refused = [(adapter, "holds an adapter, not a model", f"finetune merge {adapter.parent}"),
               (tmp_path / "x.gguf", "is a GGUF file, which can't be trained", "finetune export RUN --to gguf")]  # fmt: skip
    refused += [(adapter.parent, "is a run, not a model", f"finetune merge {adapter.parent}")] if as_model else []
    for path, problem, fix in refused:
        with pytest.raises(RecipeError, match=f"{path.name} {problem}") as caught:
            recipe_of(None if as_model else str(path), [], model=str(path) if as_model else None)
        assert fix in caught.value.fix


def test_model_and_data_replace_those_of_a_recipe_or_make_one():
    recipe = recipe_of("lora_r=8", ["max_length=512"], model="qwen3-4b", data="mine rows.jsonl")
    assert (recipe.model_name_or_path, recipe.dataset.path, recipe.lora_r) == ("qwen3-4b", "mine rows.jsonl", 8)
    changed = recipe_of("7b-4090", [], model="Qwen/Qwen3-4B", data="mine.jsonl")
    assert (changed.model_name_or_path, changed.dataset.path, changed.gpu) == ("Qwen/Qwen3-4B", "mine.jsonl", "rtx-4090")


def test_without_data_or_anything_at_all_there_is_an_error_and_a_misspelt_recipe_or_model_is_suggested():
    with pytest.raises(RecipeError, match="no dataset") as caught:
        require_dataset(recipe_of("qwen3-4b", []))
    assert "--data" in caught.value.fix
    with pytest.raises(RecipeError, match="no recipe") as caught:
        recipe_of("7b-4091", [])
    assert "7b-4090" in caught.value.fix and "model" not in caught.value.fix
    with pytest.raises(RecipeError, match="no recipe") as caught:
        recipe_of("qwn2.5-7b", [])
    assert "Qwen/Qwen2.5-7B" in caught.value.fix
    for missing in ("recipes/none.yaml", "none.yml"):
        with pytest.raises(RecipeError, match="no recipe"):
            recipe_of(missing, [])
    with pytest.raises(RecipeError, match="missing"):
        recipe_of(None, [])


@pytest.mark.slow
def test_a_model_is_planned_without_recipe_data_or_network_and_a_careless_name_has_its_hub_id(monkeypatch, capsys, finetune):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    code = show_plan("smollm2:135m", ["max_length=512"], model=None, data=None, gpu="4090", free=None, as_json=True)
    plan = json.loads(capsys.readouterr().out)
    assert code == 0 and plan["plan"]["model_name_or_path"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    notes = " ".join(plan["forecast"]["notes"])
    assert "smollm2:135m -> HuggingFaceTB/SmolLM2-135M-Instruct" in notes and "rows of 512 tokens" in notes
    code, shown = finetune("plan", "Qwen/Qwen2.5-7B-Instruct", "--gpu", "4090")
    assert code == 0 and shown.out.splitlines()[1].startswith("fits, with ")
