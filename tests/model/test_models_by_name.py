"""The packaged catalogue of models: sizes, sources, what plans need, and the model that a typed name means."""

import json
import re
from pathlib import Path

import catalogue_row
import pytest

from finetune.cli.recipes import show_recipes
from finetune.cli.source import recipe_of
from finetune.errors import RecipeError
from finetune.model import names
from finetune.model.configuration import FROM_CONFIG, read_config
from finetune.model.names import entries, resolve, suggestions
from finetune.model.transformers_config import load_config
from finetune.planner.shape import shape_of
from finetune.recipe import recipe_from
from finetune.recipe.complete import named_model

FIRST = {name: entry for name, entry in entries().items() if entry.first}
PLAIN = ("llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe", "gemma", "gemma2", "granite", "smollm3", "olmo2")


def size_in(name):
    """Billions in a hub id, such as 8B, 1_6b or 8x7B; None when it has none, or an effective one (E2B)."""
    match = re.search(r"(?<!e)(?:(\d+)x)?(\d+(?:[._]\d+)?)([bm])(?![a-z])", name.lower().rpartition("/")[2])
    if not match:
        return None
    return float(match[1] or 1) * float(match[2].replace("_", ".")) / (1000 if match[3] == "m" else 1)


def decoder_parameters(config):
    """Weights of a decoder with a gated MLP; biases and norms are below 0.1 %."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    attention = 2 * hidden * config["head_dim"] * (heads + config["num_key_value_heads"])
    experts = config.get("num_experts") or config.get("num_local_experts") or 1
    mlp = 3 * hidden * config.get("moe_intermediate_size", config["intermediate_size"]) * experts
    embedded = config["vocab_size"] * hidden * (1 if config["tie_word_embeddings"] else 2)
    return config["num_hidden_layers"] * (attention + mlp) + embedded


def test_the_catalogue_has_the_models_that_are_fine_tuned_most_with_sources_and_the_sizes_in_their_names():
    assert len(entries()) > 200 and len(FIRST) > 80
    families = {entry.config["model_type"] for entry in entries().values()}
    assert {*PLAIN, "gemma3", "qwen3_5", "falcon", "gpt_oss", "cohere2", "stablelm", "phi"} <= families
    file = json.loads(Path(names.__file__).with_name("configurations.json").read_text(encoding="utf-8"))
    for name, row in file["models"].items():
        source = row["source"] if "source" in row else file["models"][row["same_as"]]["source"]
        assert source and set(source.split(", ")) <= set(file["sources"]), name
    for name, entry in entries().items():
        billions = size_in(name)  # embeddings make small models larger than their names; Mixtral's experts share attention
        assert billions is None or 0.8 < entry.parameters / 1e9 / billions < 1.7, name


@pytest.mark.parametrize("name", [name for name, entry in entries().items() if entry.config["model_type"] in PLAIN])
def test_dimensions_give_the_published_number_of_parameters(name):
    assert decoder_parameters(entries()[name].config) == pytest.approx(entries()[name].parameters, rel=0.015)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if number % 5 else pytest.mark.slow) for number, name in enumerate(FIRST)],
)
def test_the_modules_have_the_published_number_of_parameters(name):
    recipe = recipe_from({"model_name_or_path": name, "dataset": "d"})
    assert shape_of(FIRST[name].config, recipe).parameters == pytest.approx(FIRST[name].parameters, rel=0.015)


def test_the_listing_has_every_model_and_each_id_or_short_name_leads_to_one(capsys):
    show_recipes("models", None, as_json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == entries().keys()
    row = rows["Qwen/Qwen3.6-27B"]
    assert row["family"] == "qwen3_5" and row["parameters"] == 26.9e9
    show_recipes("models", None, as_json=False)
    listed = capsys.readouterr().out
    assert all(name in listed for name in rows) and "path/to/folder" in listed
    assert [name for name in entries() if resolve(name.lower()).name != name] == []
    table = json.loads(Path(names.__file__).with_name("names.json").read_text(encoding="utf-8"))
    assert {short: name for short, name in table["names"].items() if resolve(short).name != name} == {}


def test_a_row_from_a_config_json_replaces_the_row_of_its_id_and_defaults_of_transformers_are_renewed():
    config = {
        "model_type": "lfm2", "hidden_size": 1024, "num_hidden_layers": 16, "vocab_size": 65536, "torch_dtype": "bfloat16",
        "layer_types": ["full_attention"] * 16, "rope_theta": 1e6, "eos_token_id": 7, "qk_rope_head_dim": 64,
    }  # fmt: skip
    values = catalogue_row.row_values(config)
    assert values.keys() == {"model_type", "hidden_size", "num_hidden_layers", "vocab_size", "qk_rope_head_dim"}
    row = {"parameters": 1.0, **values, "source": "hub", "date": "2026-11-24"}
    text = catalogue_row.CATALOGUE.read_text(encoding="utf-8")
    before = json.loads(text)["models"]
    for name in ("me/new", "LiquidAI/LFM2-350M"):
        changed = catalogue_row.with_row(text, name, row)
        assert json.loads(changed)["models"] == {**before, name: row}
        assert max(map(len, changed.splitlines())) <= 128
    older = text.replace('"hidden_size": 1024, "intermediate_size": 3072', '"hidden_size": 512, "intermediate_size": 3072')
    assert catalogue_row.renewed(text) == text != older
    renewed = json.loads(catalogue_row.renewed(older))["models"]["baidu/ERNIE-4.5-0.3B-PT"]
    assert renewed["hidden_size"] == 1024 and renewed["date"] == catalogue_row.TODAY


@pytest.mark.slow
def test_a_row_whose_modules_have_another_number_of_parameters_is_refused():
    config = entries()["HuggingFaceTB/SmolLM2-135M-Instruct"].config
    catalogue_row.check_parameters("me/new", config, 0.135)
    with pytest.raises(SystemExit, match="not 0.2"):
        catalogue_row.check_parameters("me/new", config, 0.2)


Q, L, M = "Qwen/Qwen2.5-7B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", "mistralai/Mistral-7B-Instruct-v0.3"
TYPED = {
    "qwen2.5-7b-instruct": Q, "qwen/qwen2.5-7b-instruct": Q,
    "unsloth/Qwen2.5-7B-Instruct-bnb-4bit": Q, "bartowski/Qwen2.5-7B-Instruct-GGUF": Q, "Qwen/Qwen2.5-7B-Instruct-AWQ": Q,
    "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4": Q, "qwen2.5:7b": Q, "Qwen2.5-7B": "Qwen/Qwen2.5-7B",
    "llama3.1:8b": L, "meta-llama/Meta-Llama-3.1-8B-Instruct": L,
    "neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8": L, "llama-3.1-8b": "meta-llama/Llama-3.1-8B",
    "hf.co/unsloth/Llama-3.2-1B-Instruct-GGUF:Q4_K_M": "meta-llama/Llama-3.2-1B-Instruct",
    "hf.co/unsloth/Qwen3-8B-GGUF:latest": "Qwen/Qwen3-8B",
    "llama2:7b": "meta-llama/Llama-2-7b-chat-hf", "unsloth/Qwen3-8B-unsloth-bnb-4bit": "Qwen/Qwen3-8B",
    "Qwen3-8B-Instruct": "Qwen/Qwen3-8B", "https://huggingface.co/Qwen/Qwen3-14B": "Qwen/Qwen3-14B",
}  # fmt: skip
#: Not one model of the catalogue; the first suggestion where there is a sensible one.
AMBIGUOUS_OR_UNKNOWN = {
    "qwen 2.5 7b instruct": Q, "Qwen2.5 7B Chat": "Qwen/Qwen2.5-7B", "qwen2.5:7b-instruct-q4_K_M": Q,
    "Llama 3.1 8B it": "meta-llama/Llama-3.1-8B", "meta/llama-3.1-8b-instruct": L,
    "meta-llama/Llama-2-7b": "meta-llama/Llama-2-7b-hf", "bartowski/Qwen_Qwen3-8B-GGUF": "Qwen/Qwen3-8B",
    "muse glimmer 30b": "meta-models/Muse-Glimmer-30B", "exaone 4.0 32b": "LGAI-EXAONE/EXAONE-4.0-32B",
    "gemma-3-4b": "google/gemma-3-4b-it", "gemma-4b-it": "google/gemma-3-4b-it",
    "granite-3.3-8b": "ibm-granite/granite-3.3-8b-instruct",
    "qwen3-4b-instruct": "Qwen/Qwen3-4B-Instruct-2507", "qwen2.5-7b-base": None, "mistral-7b-instruct": M,
    "mistral-small": "mistralai/Mistral-Small-Instruct-2409",
    "deepseek-r1:8b": "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B", "Qwen/Qwen3-8": "Qwen/Qwen3-8B", "qwn2.5-7b-instruct": Q,
    "lama-3.1-8b-instruct": L, "qwen2.5-9b-instruct": Q, "myorg/Qwen2.5-7B-Instruct": Q, "Qwen2.5-7B-Instruct-1M": Q,
    "google/Qwen2.5-7B-Instruct": Q, "qwen2.5-omni-7b-instruct": Q, "my-llama-3.1-8b-finetune": L,
    "dolphin-2.9-llama3-8b": None, "starcoder2-7b-instruct": None,
    "llama-3.1-405b": "meta-llama/Llama-3.1-70B", "llama3": None,
    "Qwen1.5-7B-Chat": None, "gemma-22b": None, "Qwen 38B": None, "Llama-38B": None,
    "phi-5": None, "unsloth": None, "--": None, "": None,
}  # fmt: skip


#: Newer models, whose configurations transformers takes.
PLANNED = {
    "Qwen/Qwen3.6-35B-A3B": "Qwen/Qwen3.6-35B-A3B", "qwen3.6:27b": "Qwen/Qwen3.6-27B",
    "unsloth/Qwen3.8-27B-GGUF": "Qwen/Qwen3.8-27B", "qwen3.5-2b": "Qwen/Qwen3.5-2B",
    "qwen3-next-80b-a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct", "muse-glimmer-30b": "meta-models/Muse-Glimmer-30B",
    "ministral-3-3b-instruct": "mistralai/Ministral-3-3B-Instruct-2512",
    "unsloth/Ministral-3-8B-Instruct-2512-GGUF": "mistralai/Ministral-3-8B-Instruct-2512",
    "ministral-3:14b": "mistralai/Ministral-3-14B-Instruct-2512", "granite-4-h-tiny": "ibm-granite/granite-4.0-h-tiny",
    "granite-4.0-h-micro": "ibm-granite/granite-4.0-h-micro", "granite4:micro": "ibm-granite/granite-4.0-micro",
    "ibm-granite/granite-4.0-h-small": "ibm-granite/granite-4.0-h-small", "glm-4.7-flash": "zai-org/GLM-4.7-Flash",
    "lfm2-1.2b": "LiquidAI/LFM2-1.2B", "LFM2.5-1.2B-Instruct": "LiquidAI/LFM2.5-1.2B-Instruct",
    "lfm2.5-8b-a1b": "LiquidAI/LFM2.5-8B-A1B", "gemma-4-12b-it": "google/gemma-4-12B-it",
    "olmo-3-32b-think": "allenai/Olmo-3-32B-Think", "gpt-oss:120b": "openai/gpt-oss-120b",
    "seed-oss-36b-instruct": "ByteDance-Seed/Seed-OSS-36B-Instruct",
    "apertus-8b-instruct": "swiss-ai/Apertus-8B-Instruct-2509", "exaone-4.0-32b": "LGAI-EXAONE/EXAONE-4.0-32B",
    "ernie-4.5-0.3b-pt": "baidu/ERNIE-4.5-0.3B-PT",
    "unsloth/Nemotron-3-Nano-30B-A3B-GGUF": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
}  # fmt: skip
#: What is typed, and what the refusal says.
REFUSED = {
    "gemma-3-4b": "google/gemma-3-4b-it or google/gemma-3-4b-pt",
    "qwen3.6": "Qwen/Qwen3.6-35B-A3B or Qwen/Qwen3.6-27B", "seed-oss-36b": "ByteDance-Seed/Seed-OSS-36B-Instruct",
    "zai-org/GLM-5.3-Flash": "Did you mean zai-org/GLM-4.7-Flash", "nobody/nothing": "hub id in full", "gpt-4o": "gpt-4o",
}  # fmt: skip


@pytest.mark.parametrize(("typed", "meant"), TYPED.items())
def test_a_name_typed_carelessly_is_the_model_that_is_meant(typed, meant):
    match = resolve(typed)
    assert match and match.name == meant and match.note.startswith(f"{typed} -> {meant}")


@pytest.mark.parametrize(("typed", "meant"), PLANNED.items())
def test_a_new_model_is_known_and_transformers_takes_its_configuration(monkeypatch, typed, meant):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    recipe, _ = named_model(recipe_from({"model_name_or_path": typed, "dataset": "d"}))
    assert recipe.model_name_or_path == meant
    assert load_config(recipe).model_type == entries()[meant].config["model_type"]


@pytest.mark.parametrize(("typed", "first"), AMBIGUOUS_OR_UNKNOWN.items())
def test_a_name_that_could_be_another_model_is_only_answered_with_suggestions(typed, first):
    assert resolve(typed) is None
    assert first is None or suggestions(typed)[0] == first


@pytest.mark.parametrize(("typed", "reason"), REFUSED.items())
def test_a_model_that_cannot_be_planned_is_refused_with_the_reason_and_the_way_on(monkeypatch, typed, reason):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError) as error:
        recipe, _ = named_model(recipe_of(typed, []))
        read_config(recipe)
    assert reason in f"{error.value} {error.value.fix}" and FROM_CONFIG in str(error.value.fix)


def test_a_recipe_gets_the_hub_id_unless_a_folder_a_revision_or_the_hub_has_the_name(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    recipe, note = named_model(recipe_from({"model_name_or_path": "llama3.1:8b", "dataset": "d", "lora_r": 8}))
    assert (recipe.model_name_or_path, recipe.lora_r, note) == (L, 8, f"llama3.1:8b -> {L}")
    assert named_model(recipe) == (recipe, "")
    packed = resolve("bartowski/Qwen2.5-7B-Instruct-GGUF").note
    assert "GGUF weights are packed for inference; LoRA trains the original" in packed
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen2.5-7b-instruct").mkdir()
    recipe = recipe_from({"model_name_or_path": "qwen2.5-7b-instruct", "dataset": "d"})
    assert named_model(recipe) == (recipe, "")
    pinned = recipe_from({"model_name_or_path": "qwen2.5-3b-instruct", "dataset": "d", "model_revision": "main"})
    assert named_model(pinned) == (pinned, "")
    snapshot = tmp_path / "hub" / "models--unsloth--Qwen3-8B-bnb-4bit" / "snapshots" / "0000"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "qwen3"}')
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0000")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    cached = recipe_from({"model_name_or_path": "unsloth/Qwen3-8B-bnb-4bit", "dataset": "d"})
    assert named_model(cached) == (cached, "")
