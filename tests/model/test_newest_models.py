"""The models that people ask for this month are planned without the hub, or refused with the reason and the way on."""

import importlib.util
import json
from pathlib import Path

import pytest

from finetune.cli.recipes import show_recipes
from finetune.cli.source import recipe_of
from finetune.errors import RecipeError
from finetune.model.catalogue import entries, sources
from finetune.model.configuration import FROM_CONFIG, named_model, read_config
from finetune.model.transformers_config import load_config
from finetune.recipe import recipe_from

PLANNED = {
    "Qwen/Qwen3.6-35B-A3B": "Qwen/Qwen3.6-35B-A3B", "qwen3.6:27b": "Qwen/Qwen3.6-27B",
    "unsloth/Qwen3.8-27B-GGUF": "Qwen/Qwen3.8-27B", "qwen3.5 2b": "Qwen/Qwen3.5-2B",
    "qwen3-next-80b-a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct", "muse glimmer 30b": "meta-models/Muse-Glimmer-30B",
    "ministral 3 3b instruct": "mistralai/Ministral-3-3B-Instruct-2512",
    "unsloth/Ministral-3-8B-Instruct-2512-GGUF": "mistralai/Ministral-3-8B-Instruct-2512",
    "ministral-3:14b": "mistralai/Ministral-3-14B-Instruct-2512", "granite 4 h tiny": "ibm-granite/granite-4.0-h-tiny",
    "granite-4.0-h-micro": "ibm-granite/granite-4.0-h-micro", "granite4:micro": "ibm-granite/granite-4.0-micro",
    "ibm-granite/granite-4.0-h-small": "ibm-granite/granite-4.0-h-small", "glm-4.7-flash": "zai-org/GLM-4.7-Flash",
    "lfm2 1.2b": "LiquidAI/LFM2-1.2B", "LFM2.5-1.2B-Instruct": "LiquidAI/LFM2.5-1.2B-Instruct",
    "lfm2.5-8b-a1b": "LiquidAI/LFM2.5-8B-A1B", "gemma-4-12b-it": "google/gemma-4-12B-it",
    "olmo-3-32b-think": "allenai/Olmo-3-32B-Think", "gpt-oss:120b": "openai/gpt-oss-120b",
    "seed-oss-36b-instruct": "ByteDance-Seed/Seed-OSS-36B-Instruct",
    "apertus 8b instruct": "swiss-ai/Apertus-8B-Instruct-2509", "exaone 4.0 32b": "LGAI-EXAONE/EXAONE-4.0-32B",
    "ernie-4.5-0.3b-pt": "baidu/ERNIE-4.5-0.3B-PT",
    "unsloth/Nemotron-3-Nano-30B-A3B-GGUF": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
}  # fmt: skip
#: What is typed, and what the refusal says.
REFUSED = {
    "kimi linear 48b a3b": "moonshotai/Kimi-Linear-48B-A3B-Instruct", "nemotron 3.5 lightning": "is not in the offline",
    "mistral small 4": "has more than a hundred billion parameters",
    "gemma-3-4b": "google/gemma-3-4b-it or google/gemma-3-4b-pt",
    "qwen3.6": "Qwen/Qwen3.6-35B-A3B or Qwen/Qwen3.6-27B", "seed-oss-36b": "ByteDance-Seed/Seed-OSS-36B-Instruct",
    "qwen3.8-max": "has more than a hundred billion parameters", "kimi-k2.5": "has more than a hundred billion parameters",
    "zai-org/GLM-5.2": "has more than a hundred billion parameters", "hunyuan 7b": "tencent/Hunyuan-7B-Instruct",
    "zai-org/GLM-5.3-Flash": "its memory can't be forecast", "google/gemma-3n-E4B-it": "timm",
    "XiaomiMiMo/MiMo-7B-Base": "mimo", "LiquidAI/LFM3-1.7B": "is not in the offline catalogue",
    "nobody/nothing": "hub id in full",
}  # fmt: skip
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "catalogue_row.py"


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("catalogue_row", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(("typed", "meant"), PLANNED.items())
def test_a_new_model_is_known_and_transformers_takes_its_configuration(typed, meant):
    recipe, _ = named_model(recipe_from({"model_name_or_path": typed, "dataset": "d"}))
    assert recipe.model_name_or_path == meant
    config, entry = load_config(recipe), entries()[meant]
    assert config.model_type == entry.config["model_type"] and entry.date


@pytest.mark.parametrize(("typed", "reason"), REFUSED.items())
def test_a_new_model_that_cannot_be_planned_is_refused_with_the_reason_and_the_way_on(typed, reason):
    with pytest.raises(RecipeError) as error:
        recipe, _ = named_model(recipe_of(typed, []))
        read_config(recipe)
    assert reason in f"{error.value} {error.value.fix}" and FROM_CONFIG in str(error.value.fix)


def test_a_folder_with_nothing_but_a_config_json_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(entries()["Qwen/Qwen3-8B"].config))
    assert load_config(recipe_from({"model_name_or_path": str(tmp_path), "dataset": "d"})).hidden_size == 4096


def test_the_listing_has_every_model_with_its_sources(capsys):
    show_recipes("models", None, as_json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == entries().keys()
    row = rows["Qwen/Qwen3.6-27B"]
    assert row["family"] == "qwen3_5" and row["parameters"] == 26.9e9 and row["sources"] == [sources()["aic"]]
    show_recipes("models", None, as_json=False)
    listed = capsys.readouterr().out
    assert all(name in listed for name in rows) and "path/to/folder" in listed


def test_a_row_from_a_config_json_has_what_planning_needs_and_replaces_the_row_of_its_id(script):
    config = {
        "model_type": "lfm2", "hidden_size": 1024, "num_hidden_layers": 16, "vocab_size": 65536, "torch_dtype": "bfloat16",
        "layer_types": ["full_attention"] * 16, "rope_theta": 1e6, "eos_token_id": 7, "qk_rope_head_dim": 64,
    }  # fmt: skip
    values = script.row_values(config)
    assert values.keys() == {"model_type", "hidden_size", "num_hidden_layers", "vocab_size", "qk_rope_head_dim"}
    row = {"parameters": 1.0, **values, "source": "hub", "date": "2026-11-24"}
    text = script.CATALOGUE.read_text(encoding="utf-8")
    before = json.loads(text)["models"]
    for name in ("me/new", "LiquidAI/LFM2-350M"):
        changed = script.with_row(text, name, row)
        assert json.loads(changed)["models"] == {**before, name: row}
        assert max(map(len, changed.splitlines())) <= 128


def test_rows_that_are_the_defaults_of_transformers_are_renewed_from_them(script):
    text = script.CATALOGUE.read_text(encoding="utf-8")
    older = text.replace('"hidden_size": 1024, "intermediate_size": 3072', '"hidden_size": 512, "intermediate_size": 3072')
    assert script.renewed(text) == text != older
    renewed = json.loads(script.renewed(older))["models"]["baidu/ERNIE-4.5-0.3B-PT"]
    assert renewed["hidden_size"] == 1024 and renewed["date"] == script.TODAY


@pytest.mark.slow
def test_a_row_whose_modules_have_another_number_of_parameters_is_refused(script):
    config = entries()["HuggingFaceTB/SmolLM2-135M-Instruct"].config
    script.check_parameters("me/new", config, 0.135)
    with pytest.raises(SystemExit, match="published are 0.2"):
        script.check_parameters("me/new", config, 0.2)
