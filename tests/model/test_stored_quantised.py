"""Checkpoints stored quantised: bitsandbytes' are built as stored, others are refused."""

import functools
import json

import pytest
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file
from small_models import SMALL, load, on_meta
from small_models import settings as plain_settings
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig

from finetune.errors import RecipeError
from finetune.model.configuration import stored_notes, stored_quantisation, trainable_formats

TINY = {**SMALL, "num_hidden_layers": 1}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
settings = functools.partial(plain_settings, load_in_4bit=True)


def stored_as(folder, quantisation):
    """A folder with the config.json of a quantised checkpoint."""
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **TINY, "quantization_config": quantisation}))
    return folder


@pytest.fixture(scope="module", params=["nf4", "fp4"])
def kind_and_folder(tmp_path_factory, request):
    """A small Llama as bitsandbytes stores it, its last layer in 16 bit, as in Unsloth's dynamic checkpoints."""
    plain, folder = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(LlamaConfig(**TINY)).save_pretrained(plain)
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=request.param, bnb_4bit_use_double_quant=True,
        llm_int8_skip_modules=["lm_head", "model.layers.0.mlp.down_proj"],
    )  # fmt: skip
    AutoModelForCausalLM.from_pretrained(plain, quantization_config=config).save_pretrained(folder)
    return request.param, folder


@pytest.mark.parametrize("with_method", [True, False])
def test_a_4_bit_checkpoint_is_built_as_it_is_stored(kind_and_folder, with_method):
    kind, folder = kind_and_folder
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"].pop("quant_method", None)
    values["quantization_config"] |= {"quant_method": "bitsandbytes"} if with_method else {}  # first versions wrote none
    (folder / "config.json").write_text(json.dumps(values))
    real, bare = (load(settings(folder), weights=weights) for weights in (True, False))
    assert [(name, type(part)) for name, part in real.named_modules()] == [(n, type(part)) for n, part in bare.named_modules()]
    layer = real.model.layers[0]
    assert isinstance(layer.mlp.up_proj, Linear4bit) and not isinstance(layer.mlp.down_proj, Linear4bit)
    stored = load_file(folder / "model.safetensors")
    assert bytes(layer.mlp.up_proj.weight.data.numpy()) == bytes(stored["model.layers.0.mlp.up_proj.weight"].numpy())
    assert layer.mlp.up_proj.weight.quant_state.dtype == real.dtype
    assert layer.mlp.up_proj.weight.quant_state.quant_type == bare.model.layers[0].mlp.up_proj.weight.quant_type == kind


UNTRAINABLE = ["gptq", "awq", "compressed-tensors", "hqq", "something-new", None, 7]
REFUSED = [*((method, bits) for method in UNTRAINABLE for bits in (4, 8, 16)), ("fp8", 4), ("fp8", 8), ("mxfp4", 8)]


@pytest.mark.parametrize(("method", "bits"), REFUSED)
def test_what_can_not_be_trained_is_refused_whatever_the_recipe_wants(tmp_path, method, bits):
    folder = stored_as(tmp_path, {"quant_method": method, "bits": 4})
    with pytest.raises(RecipeError, match=f"stored as {method or 'an unknown quantisation'}"):
        load(settings(folder, load_in_4bit=bits == 4, load_in_8bit=bits == 8), weights=False)


MIXTURE = {**TINY, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 192}
GIVE = "Give the 16-bit model; load_in_4bit=true"


@pytest.mark.parametrize(
    ("values", "stored", "bits", "problem", "fix"),
    [
        (TINY, {"quant_method": "gptq"}, 4, "gptq", GIVE),
        (TINY, {"quant_method": "awq"}, 16, "awq", GIVE),
        (MIXTURE, NF4, 4, "with separate experts", GIVE),
        (TINY, NF4, 16, "stored in 4bit", "Set load_in_4bit=true, or give the 16-bit model."),
    ],
)
def test_the_fix_is_the_16_bit_model(values, stored, bits, problem, fix):
    with pytest.raises(RecipeError, match=problem) as caught:
        on_meta(settings(load_in_4bit=bits == 4), {"model_type": "llama", **values, "quantization_config": stored})
    assert caught.value.fix.startswith(fix)


@pytest.mark.parametrize("value", ["gptq", ["gptq"], 4, True])
def test_a_quantisation_that_is_no_object_is_a_recipe_error(value):
    with pytest.raises(RecipeError, match="not an object"):
        stored_quantisation({"quantization_config": value}, "some/model")


@pytest.mark.parametrize("changes", [{"bnb_4bit_quant_type": "fp4"}, {"bnb_4bit_quant_type": None}])
def test_a_plan_says_that_a_checkpoint_is_in_fp4(changes):
    assert "are FP4" in stored_notes(NF4 | changes)[0]
    assert stored_notes(NF4) == stored_notes({}) == stored_notes({"quant_method": "bitsandbytes", "load_in_8bit": True}) == ()


def test_formats_that_a_stored_checkpoint_can_be_trained_in():
    stored = {
        "16-bit": None, "empty": {}, "nf4": NF4, "old nf4": {"load_in_4bit": True}, "int8": {"load_in_8bit": True},
        "mxfp4": {"quant_method": "mxfp4"}, "fp8": {"quant_method": "fp8"}, "gptq": {"quant_method": "gptq"},
    }  # fmt: skip
    formats = {name: trainable_formats(stored_quantisation({"quantization_config": own}, "m")) for name, own in stored.items()}
    assert {name: [base.label for base in trainable] for name, trainable in formats.items()} == {
        "16-bit": [], "empty": [], "nf4": ["NF4"], "old nf4": ["NF4"], "int8": ["int8"], "mxfp4": ["16 bit", "NF4"],
        "fp8": ["16 bit"], "gptq": ["16 bit"],
    }  # fmt: skip
