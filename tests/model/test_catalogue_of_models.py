"""The packaged catalogue of models: sizes, sources, and what plans need."""

import json
import re
from pathlib import Path

import catalogue_row
import pytest

from finetune.cli.recipes import show_recipes
from finetune.model import names
from finetune.model.names import entries
from finetune.planner.shape import shape_of
from finetune.recipe import recipe_from

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


def test_the_catalogue_has_the_models_that_are_fine_tuned_most():
    assert len(entries()) > 200 and len(FIRST) > 80
    families = {entry.config["model_type"] for entry in entries().values()}
    assert {*PLAIN, "gemma3", "qwen3_5", "falcon", "gpt_oss", "cohere2", "stablelm", "phi"} <= families


def test_every_entry_says_where_its_values_are_from():
    file = json.loads(Path(names.__file__).with_name("configurations.json").read_text(encoding="utf-8"))
    for name, row in file["models"].items():
        source = row["source"] if "source" in row else file["models"][row["same_as"]]["source"]
        assert source and set(source.split(", ")) <= set(file["sources"]), name


@pytest.mark.parametrize("name", [name for name, entry in entries().items() if entry.config["model_type"] in PLAIN])
def test_dimensions_give_the_published_number_of_parameters(name):
    assert decoder_parameters(entries()[name].config) == pytest.approx(entries()[name].parameters, rel=0.015)


def test_the_size_in_a_name_is_about_the_published_one():
    for name, entry in entries().items():
        billions = size_in(name)  # embeddings make small models larger than their names; Mixtral's experts share attention
        assert billions is None or 0.8 < entry.parameters / 1e9 / billions < 1.7, name


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.exhaustive if number % 5 else pytest.mark.slow) for number, name in enumerate(FIRST)],
)
def test_the_modules_have_the_published_number_of_parameters(name):
    recipe = recipe_from({"model_name_or_path": name, "dataset": "d"})
    assert shape_of(FIRST[name].config, recipe).parameters == pytest.approx(FIRST[name].parameters, rel=0.015)


def test_the_listing_has_every_model(capsys):
    show_recipes("models", None, as_json=True)
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows.keys() == entries().keys()
    row = rows["Qwen/Qwen3.6-27B"]
    assert row["family"] == "qwen3_5" and row["parameters"] == 26.9e9
    show_recipes("models", None, as_json=False)
    listed = capsys.readouterr().out
    assert all(name in listed for name in rows) and "path/to/folder" in listed


def test_a_row_from_a_config_json_has_what_planning_needs_and_replaces_the_row_of_its_id():
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


def test_rows_that_are_the_defaults_of_transformers_are_renewed_from_them():
    text = catalogue_row.CATALOGUE.read_text(encoding="utf-8")
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
