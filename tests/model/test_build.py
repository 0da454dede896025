"""Base model and adapters are built alike from tiny models on disk and on meta."""

import json
from pathlib import Path

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from small_models import SMALL, load, on_meta, settings
from transformers import AutoModelForCausalLM, LlamaConfig

from finetune.errors import RecipeError
from finetune.model import configuration
from finetune.model.adapters import attach_adapters, prepare_for_training, trainable_parameters
from finetune.model.configuration import resolve_model_path
from finetune.model.transformers_config import config_from

TINY = {"model_type": "llama", **SMALL}


def adapted(recipe, values=TINY):
    return attach_adapters(on_meta(recipe, values), recipe)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A two-layer Llama in bf16, saved as safetensors."""
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("wanted", "kind"), [({}, torch.nn.Linear), ({"load_in_4bit": True}, Linear4bit), ({"load_in_8bit": True}, Linear8bitLt)]
)
def test_the_same_modules_with_weights_and_without_and_adapters_in_fp32(folder, wanted, kind):
    recipe = settings(folder, **wanted)
    real, bare = (attach_adapters(load(recipe, weights=weights), recipe) for weights in (True, False))
    modules, trained = (
        [[(name, type(part)) for name, part in model.named_modules()] for model in (real, bare)],
        [[(name, p.shape, p.dtype) for name, p in trainable_parameters(model)] for model in (real, bare)],
    )
    assert modules[0] == modules[1] and trained[0] == trained[1]
    assert isinstance(real.get_base_model().model.layers[0].mlp.up_proj.base_layer, kind)
    assert all("lora_" in name and dtype == torch.float32 for name, _, dtype in trained[0])
    widths = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]  # q k v o gate up down
    assert sum(shape.numel() for _, shape, _ in trained[0]) == 2 * sum(4 * (i + o) for i, o in widths)
    assert all(parameter.is_meta for parameter in bare.parameters())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_compute_dtype_is_the_recipes(folder, dtype):
    assert load(settings(folder, dtype=dtype)).dtype == getattr(torch, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_have_the_recipes_dtype_after_trls_cast_to_bf16(dtype):
    recipe = settings(adapter_dtype=dtype)
    model = adapted(recipe)
    for _, parameter in trainable_parameters(model):
        parameter.data = parameter.data.to(torch.bfloat16)
    prepare_for_training(model, recipe)
    assert {p.dtype for _, p in trainable_parameters(model)} == {getattr(torch, dtype)}


def test_evaluation_does_not_change_a_4bit_model_that_trains_on(folder):
    recipe = settings(folder, load_in_4bit=True)
    model = attach_adapters(load(recipe), recipe)
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


def test_dora_and_rank_stabilised_scale_are_passed_on_and_attention_that_the_model_lacks_is_refused():
    model = adapted(settings(use_dora=True, use_rslora=True, lora_alpha=8.0, lora_r=4))
    assert any("lora_magnitude_vector" in name for name, _ in trainable_parameters(model))
    assert model.get_base_model().model.layers[0].self_attn.q_proj.scaling["default"] == 8 / 4**0.5
    values = {**TINY, "model_type": "gemma2", "head_dim": 16}
    with pytest.raises(RecipeError, match="gemma2|Gemma2") as caught:
        on_meta(settings(attn_implementation="sdpa"), values)
    assert caught.value.fix == "Set attn_implementation=eager."
    assert configuration.default_attention(values) == "eager"
    assert configuration.default_attention(TINY) == "sdpa"


HYBRID = {**SMALL, "model_type": "nemotron_h", "hybrid_override_pattern": "M-M*M-"}


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
        ({**TINY, "model_type": "bert"}, "is an encoder"),
        ({**TINY, "model_type": "bart"}, "is an encoder with a decoder"),
        ({**HYBRID, "num_hidden_layers": 8}, "has num_hidden_layers 8, but describes 6"),
    ],
)  # fmt: skip
def test_a_config_that_makes_no_model_is_a_recipe_error(values, problem):
    with pytest.raises(RecipeError, match="some/model") as caught:
        config_from(values, settings("some/model"))
    assert problem in "\n".join(caught.value.problems)


def test_all_missing_fields_are_named_and_other_names_of_them_and_a_pattern_of_layers_count():
    with pytest.raises(RecipeError) as caught:
        config_from({"model_type": "llama"}, settings())
    assert len(caught.value.problems) == 4
    config = config_from({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 99}, settings())
    assert (config.hidden_size, config.num_hidden_layers) == (64, 2)
    config = config_from({**HYBRID, "num_hidden_layers": 6}, settings())
    assert (config.num_hidden_layers, config.hybrid_override_pattern) == (6, "M-M*M-")


@pytest.mark.parametrize(
    ("more", "problem", "fix"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, "output layer can't have an adapter", "q_proj"),
        ({"target_modules": ".*(q_proj|lm_head)"}, "output layer can't have an adapter", "q_proj"),
        ({"target_modules": ["qkv_proj"]}, "this model has no layer qkv_proj", "q_proj"),
        ({"target_modules": ["q_proj", "v_porj"]}, "this model has no layer v_porj", "v_proj"),
        ({"target_modules": "all-linear", "use_dora": True}, "use_dora", "use_dora=false"),
    ],
    ids=str,
)
def test_adapters_that_the_model_can_not_have_are_refused_with_its_layers(more, problem, fix):
    with pytest.raises(RecipeError, match=problem) as caught:
        adapted(settings(**more), {**TINY, "model_type": "mixtral", "num_local_experts": 4} if "use_dora" in more else TINY)
    assert fix in caught.value.fix


def test_resolve_model_path(folder, tmp_path):
    assert resolve_model_path(settings(folder)) == str(folder)
    assert resolve_model_path(settings("Qwen/Qwen3-8B")) == "Qwen/Qwen3-8B"
    for name in ("adapter/adapter_config.json", "empty/notes.txt", "gguf/x.gguf"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    for name, problem in (
        (tmp_path / "gguf", "has no config.json; x.gguf is a GGUF file"),
        (tmp_path / "gguf" / "x.gguf", "is a GGUF file, which can't be trained"),
        (tmp_path / "empty", "has no config.json"),
        (tmp_path / "adapter", "holds an adapter"),
        (tmp_path / "nothing", f"base model's folder is missing: {tmp_path}/nothing"),
        ("two words", "is neither a model folder nor a hub id"),
    ):
        with pytest.raises(RecipeError, match=problem):
            resolve_model_path(settings(name))


@pytest.mark.parametrize(("content", "problem"), [("{", "config.json can't be read"), (json.dumps([1]), "not an object")])
def test_a_damaged_config_is_a_recipe_error(tmp_path, content, problem):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(RecipeError, match=problem):
        configuration.read_config(settings(tmp_path))
