"""Base model and adapters are built alike from tiny models on disk and on meta."""

import json
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from finetune.errors import RecipeError
from finetune.model import configuration
from finetune.model.adapters import attach_adapters, cast_adapters, prepare_for_training, trainable_parameters
from finetune.model.build import build_base
from finetune.model.configuration import resolve_model_path
from finetune.model.transformers_config import config_from, load_config
from finetune.recipe import recipe_from
from finetune.settings import Settings, plainest

TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256,
}  # fmt: skip


def settings(name: str = "some/model", **more) -> Settings:
    values = {"model_name_or_path": name, "dataset": "rows.jsonl", "lora_r": 4, "lora_alpha": 8, "dtype": "bfloat16"}
    plain = {"load_in_4bit": False, "load_in_8bit": False, "activation_checkpointing": False}
    return plainest(recipe_from({**values, **plain, **more}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A two-layer Llama in bf16, saved as safetensors."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(**{key: value for key, value in TINY.items() if key != "model_type"})
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [({}, torch.nn.Linear), ({"load_in_4bit": True}, Linear4bit), ({"load_in_8bit": True}, Linear8bitLt)],
)
def test_the_same_modules_with_weights_and_without(folder, wanted, kind):
    recipe = settings(str(folder), **wanted)
    config = load_config(recipe)
    real = attach_adapters(build_base(recipe, config, device="cpu", weights=True), recipe)
    bare = attach_adapters(build_base(recipe, load_config(recipe), device="cpu", weights=False), recipe)
    assert [(name, type(part)) for name, part in real.named_modules()] == [
        (name, type(part)) for name, part in bare.named_modules()
    ]
    assert isinstance(real.get_base_model().model.layers[0].mlp.up_proj.base_layer, kind)
    assert [(name, p.shape, p.dtype) for name, p in trainable_parameters(real)] == [
        (name, p.shape, p.dtype) for name, p in trainable_parameters(bare)
    ]
    assert all(parameter.is_meta for parameter in bare.parameters())


def test_adapters_are_fp32_and_count_rank_times_in_and_out():
    recipe = settings()
    model = attach_adapters(build_base(recipe, config_from(TINY, recipe), device="cpu", weights=False), recipe)
    widths = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]  # q k v o gate up down
    assert sum(p.numel() for _, p in trainable_parameters(model)) == 2 * sum(4 * (i + o) for i, o in widths)
    assert {p.dtype for _, p in trainable_parameters(model)} == {torch.float32}
    assert all("lora_" in name for name, _ in trainable_parameters(model))


def test_compute_dtype_is_the_recipes(folder):
    for name, dtype in (("float32", torch.float32), ("float16", torch.float16)):
        recipe = settings(str(folder), dtype=name)
        assert build_base(recipe, load_config(recipe), device="cpu", weights=True).dtype == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_have_the_recipes_dtype_after_trls_cast_to_bf16(dtype):
    recipe = settings(adapter_dtype=dtype)
    model = attach_adapters(build_base(recipe, config_from(TINY, recipe), device="cpu", weights=False), recipe)
    for _, parameter in trainable_parameters(model):
        parameter.data = parameter.data.to(torch.bfloat16)
    cast_adapters(model, recipe)
    assert {p.dtype for _, p in trainable_parameters(model)} == {getattr(torch, dtype)}


def test_evaluation_does_not_change_a_4bit_model_that_trains_on(folder):
    recipe = settings(str(folder), load_in_4bit=True)
    model = attach_adapters(build_base(recipe, load_config(recipe), device="cpu", weights=True), recipe)
    prepare_for_training(model, recipe)
    ids = torch.arange(32).reshape(2, 16)
    before = model(input_ids=ids, labels=ids).loss.item()
    model.eval()
    with torch.no_grad():
        model(input_ids=ids)
    model.train()
    assert model(input_ids=ids, labels=ids).loss.item() == before
    packed = [module for module in model.modules() if isinstance(module, Linear4bit)]
    assert packed and not any(module.support_avx512bf16_for_cpu for module in packed)


def test_dora_and_rank_stabilised_scale_are_passed_on():
    recipe = settings(use_dora=True, use_rslora=True, lora_alpha=8.0, lora_r=4)
    model = attach_adapters(build_base(recipe, config_from(TINY, recipe), device="cpu", weights=False), recipe)
    assert any("lora_magnitude_vector" in name for name, _ in trainable_parameters(model))
    assert model.get_base_model().model.layers[0].self_attn.q_proj.scaling["default"] == 8 / 4**0.5


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"model_type": "not_a_model"}, "does not know model_type 'not_a_model'"),
        ({"model_type": "mystery", "auto_map": {"AutoConfig": "code.Config"}}, "needs code from the model's repository"),
        ({}, "has no model_type"),
        ({"model_type": "llama", "vocab_size": 10}, "has no hidden_size"),
        ({**TINY, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({**TINY, "hidden_size": "big"}, "hidden_size is 'big'"),
        ({**TINY, "num_attention_heads": 7}, "is not valid for a llama model"),
        ({"model_type": "bert", **{k: v for k, v in TINY.items() if k != "model_type"}}, "is an encoder"),
        ({**TINY, "model_type": "bart"}, "is an encoder with a decoder"),
    ],
)  # fmt: skip
def test_a_config_that_makes_no_model_is_a_recipe_error(values, problem):
    recipe = settings("some/model")
    with pytest.raises(RecipeError, match="some/model") as caught:
        config_from(values, recipe)
    assert problem in "\n".join(caught.value.problems)


def test_all_missing_fields_are_named_at_once():
    with pytest.raises(RecipeError) as caught:
        config_from({"model_type": "llama"}, settings())
    assert len(caught.value.problems) == 4


def test_other_names_of_the_needed_fields_count():
    config = config_from({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99}, settings())
    assert (config.hidden_size, config.num_hidden_layers) == (64, 2)


def test_a_pattern_of_layers_decides_the_depth_and_a_contradiction_is_refused():
    hybrid = {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M*M-",
        **{k: v for k, v in TINY.items() if "type" not in k},
    }
    config = config_from({**hybrid, "num_hidden_layers": 6}, settings())
    assert (config.num_hidden_layers, config.hybrid_override_pattern) == (6, "M-M*M-")
    with pytest.raises(RecipeError, match="has num_hidden_layers 8, but describes 6"):
        config_from({**hybrid, "num_hidden_layers": 8}, settings())


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], ".*(q_proj|lm_head)"])
def test_an_adapter_of_the_output_layer_is_refused(targets):
    recipe = settings(target_modules=targets)
    with pytest.raises(RecipeError, match="output layer can't have an adapter") as caught:
        attach_adapters(build_base(recipe, config_from(TINY, recipe), device="cpu", weights=False), recipe)
    assert "q_proj" in caught.value.fix


def test_an_unknown_target_lists_the_models_layers():
    recipe = settings(target_modules=["qkv_proj"])
    with pytest.raises(RecipeError) as caught:
        attach_adapters(build_base(recipe, config_from(TINY, recipe), device="cpu", weights=False), recipe)
    assert "qkv_proj" in caught.value.problems[0]
    assert "q_proj" in caught.value.fix


def test_one_unknown_name_among_targets_is_refused():
    recipe = settings(target_modules=["q_proj", "v_porj"])
    with pytest.raises(RecipeError, match="this model has no layer v_porj") as caught:
        attach_adapters(build_base(recipe, config_from(TINY, recipe), device="cpu", weights=False), recipe)
    assert "v_proj" in caught.value.fix


def test_dora_for_experts_is_refused_with_a_hint():
    recipe = settings(target_modules="all-linear", use_dora=True)
    values = {**TINY, "model_type": "mixtral", "num_local_experts": 4}
    with pytest.raises(RecipeError, match="use_dora") as caught:
        attach_adapters(build_base(recipe, config_from(values, recipe), device="cpu", weights=False), recipe)
    assert "use_dora=false" in caught.value.fix


def test_attention_that_the_model_lacks_says_what_to_type():
    values = {**TINY, "model_type": "gemma2", "head_dim": 16}
    recipe = settings(attn_implementation="sdpa")
    with pytest.raises(RecipeError, match="gemma2|Gemma2") as caught:
        build_base(recipe, config_from(values, recipe), device="cpu", weights=False)
    assert caught.value.fix == "Set attn_implementation=eager."
    assert configuration.default_attention(values) == "eager"
    assert configuration.default_attention(TINY) == "sdpa"


@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_a_checkpoint_in_another_quantisation_is_refused_for_4bit(method):
    recipe = settings(load_in_4bit=True)
    config = config_from({**TINY, "quantization_config": {"quant_method": method}}, recipe)
    with pytest.raises(RecipeError, match=method):
        build_base(recipe, config, device="cpu", weights=False)


def test_a_4bit_checkpoint_needs_load_in_4bit():
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    recipe = settings(load_in_4bit=False)
    with pytest.raises(RecipeError, match="stored in 4bit"):
        build_base(recipe, config_from({**TINY, "quantization_config": stored}, recipe), device="cpu", weights=False)


def test_resolve_model_path(folder, tmp_path):
    assert resolve_model_path(settings(str(folder))) == str(folder)
    assert resolve_model_path(settings("Qwen/Qwen3-8B")) == "Qwen/Qwen3-8B"
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "x.gguf").touch()
    for name, problem in (
        (str(tmp_path / "gguf"), "has no config.json; x.gguf is a GGUF file"),
        (str(tmp_path / "gguf" / "x.gguf"), "is a GGUF file, which can't be trained"),
        (str(tmp_path / "empty"), "has no config.json"),
        (str(tmp_path / "adapter"), "holds an adapter"),
        (str(tmp_path / "nothing"), f"folder of the base model is missing: {tmp_path}/nothing"),
        ("two words", "is not a model folder and not a hub id"),
    ):
        with pytest.raises(RecipeError, match=problem):
            resolve_model_path(settings(name))


def test_weights_that_are_missing_are_a_recipe_error(tmp_path):
    Qwen2Config(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=99
    ).save_pretrained(tmp_path)
    recipe = settings(str(tmp_path))
    with pytest.raises(RecipeError, match=tmp_path.name) as caught:
        build_base(recipe, load_config(recipe), device="cpu", weights=True)
    assert "safetensors" in str(caught.value)


def test_the_catalogue_replaces_a_hub_that_can_not_be_reached(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert configuration.read_config(settings("Qwen/Qwen3-8B"))["num_hidden_layers"] == 36
    with pytest.raises(RecipeError, match="not in the catalogue") as caught:
        configuration.read_config(settings("Qwen/Qwen3-8"))
    assert "Qwen/Qwen3-8B" in caught.value.fix


def test_a_damaged_config_is_a_recipe_error(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RecipeError, match="config.json can't be read"):
        configuration.read_config(settings(str(tmp_path)))
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(RecipeError, match="not an object"):
        configuration.read_config(settings(str(tmp_path)))
