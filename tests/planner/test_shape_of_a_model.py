"""Counts of a model's parameters compared with arithmetic."""

import pytest

from finetune.errors import RecipeError
from finetune.model.configuration import read_config
from finetune.planner.shape import shape_of
from finetune.recipe import parse_recipe
from finetune.settings.base_formats import BITS_16, NF4


def shape(model, *overrides):
    recipe = parse_recipe(f"model_name_or_path: {model}\ndataset: d\n", overrides=overrides)
    return shape_of(read_config(recipe), recipe)


def test_llama_8b_has_the_published_parameters_and_42_million_at_rank_16():
    llama = shape("meta-llama/Llama-3.1-8B-Instruct")
    assert llama.parameters == 8_030_261_248 and llama.billions == "8.0B"
    attention, mlp = 2 * 4096 * 4096 + 2 * 4096 * 1024, 3 * 4096 * 14336
    assert llama.linear == 32 * (attention + mlp) and llama.head == 128_256 * 4096
    layer_width = 2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336)
    assert llama.adapter_per_rank == llama.linear_width == 32 * layer_width and 16 * llama.adapter_per_rank == 41_943_040
    assert llama.adapters == 7 * 32 and llama.attention_width == 4096


def test_nf4_weights_take_half_a_byte_and_their_scales():
    llama = shape("meta-llama/Llama-3.1-8B-Instruct")
    assert llama.weight_bytes(BITS_16) == 2 * llama.parameters
    nf4 = llama.linear * (0.5 + 1 / 64 + 4 / (64 * 256)) + 2 * (llama.parameters - llama.linear)
    assert llama.weight_bytes(NF4) == pytest.approx(nf4, abs=1) and llama.weight_bytes(NF4) / 2**30 == pytest.approx(
        5.31, abs=0.02
    )


@pytest.mark.slow
def test_only_the_targets_get_adapters():
    attention_only = shape("meta-llama/Llama-3.1-8B-Instruct", 'target_modules=["q_proj", "v_proj"]')
    assert attention_only.adapter_per_rank == 32 * ((4096 + 4096) + (4096 + 1024)) and attention_only.adapters == 64
    with pytest.raises(RecipeError, match="no_such_layer"):
        shape("meta-llama/Llama-3.2-1B-Instruct", 'target_modules=["no_such_layer"]')


def test_a_mixture_computes_with_its_active_experts_only():
    mixture = shape("Qwen/Qwen3-30B-A3B")
    assert (mixture.experts, mixture.experts_used) == (128, 8)
    assert mixture.expert == 48 * 128 * 3 * 2048 * 768
    assert 2.5e9 < mixture.computed < 3.5e9 and mixture.parameters == pytest.approx(30.5e9, rel=0.01)


#: Layers without attention, with a window and with a state, and mixers.
LAYERS = {
    "Qwen/Qwen3.5-4B": (24, 0, 24, 24), "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (46, 0, 23, 23),
    "tiiuae/Falcon-H1-7B-Instruct": (0, 0, 44, 44), "LiquidAI/LFM2-350M": (10, 0, 10, 0), "google/gemma-3-4b-it": (0, 29, 0, 0),
    "mistralai/Mistral-7B-v0.1": (0, 32, 0, 0), "mistralai/Mistral-7B-Instruct-v0.3": (0, 0, 0, 0),
}  # fmt: skip


@pytest.mark.parametrize("model", LAYERS)
def test_layers_are_counted_by_what_they_have(model):
    counted = shape(model)
    assert (counted.unattended, counted.windowed, counted.stateful, counted.mixers) == LAYERS[model]
