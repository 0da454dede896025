"""4-bit experts of mixtures: loaded from every form, the same products and gradients, and no 16-bit copies for backward."""

import json

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from finetune.errors import RecipeError
from finetune.model.adapters import attach_adapters, trainable_parameters
from finetune.model.build import build_base, build_on_meta
from finetune.model.quantisation import quantization_config, why_experts_stay_16_bit
from finetune.model.transformers_config import config_from, load_config
from finetune.recipe import recipe_from
from finetune.settings import plainest, resolved

MIXTURE = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "num_experts_per_tok": 2, "head_dim": 16,
}  # fmt: skip
KINDS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 192}, "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
}  # fmt: skip
WEIGHTS = ("gate_up_proj", "down_proj")


def settings(name="some/model", **more):
    values = {"model_name_or_path": name, "dataset": "rows.jsonl", "lora_r": 4, "dtype": "float32", "load_in_8bit": False}
    return plainest(
        recipe_from({**values, "load_in_4bit": True, "activation_checkpointing": False, "attn_implementation": "eager", **more})
    )


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory):
    """A small mixture as transformers saves it: of Qwen3 and Mixtral each expert by itself, of gpt-oss fused."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    config = AutoConfig.for_model(request.param, **MIXTURE, **KINDS[request.param])
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def loaded(folder, **more):
    wanted = settings(str(folder), **more)
    return build_base(wanted, load_config(wanted), device="cpu", weights=True)


def experts_of(model):
    return model.model.layers[0].mlp.experts


def dequantised(weight):
    return dequantize_4bit(weight.data, weight.quant_state)


def relative_distance(values, reference):
    """Relative distance."""
    return ((values - reference).norm() / reference.norm()).item()


def pair(folder):
    """Experts in 4 bit, and the same in 32 bit with the dequantised weights."""
    packed, plain = experts_of(loaded(folder)), experts_of(loaded(folder, load_in_4bit=False))
    with torch.no_grad():
        for name in WEIGHTS:
            getattr(plain, name).copy_(dequantised(getattr(packed, name)))
    return packed, plain


def routed(experts, hidden):
    chosen = torch.tensor([[token % 4, (token + 1 + token % 2) % 4] for token in range(len(hidden))])
    return experts(hidden, chosen, torch.full(chosen.shape, 0.5))


def test_experts_are_loaded_in_4_bit_and_nothing_else_changes(folder):
    packed, plain = loaded(folder), loaded(folder, load_in_4bit=False)
    for name in WEIGHTS:
        weight, original = getattr(experts_of(packed), name), getattr(experts_of(plain), name)
        assert weight.numel() == original.numel() // 2
        assert weight.quant_state.shape == original.shape
        assert relative_distance(dequantised(weight), original) < 0.12  # NF4 of normal values
    other = dict(packed.named_parameters())
    for name, parameter in plain.named_parameters():
        if ".experts." not in name and "proj" not in name:  # router, norms, embeddings
            assert torch.equal(other[name], parameter), name


def test_products_and_gradients_are_those_of_the_dequantised_weights(folder):
    results = []
    for experts in pair(folder):
        torch.manual_seed(1)
        hidden = torch.randn(24, 64, requires_grad=True)
        out = routed(experts, hidden)
        out.square().sum().backward()
        results.append((out, hidden.grad))
    for packed, dequantised_result in zip(*results, strict=True):
        assert relative_distance(packed, dequantised_result) < 1e-5


def test_backward_saves_no_dequantised_weight(folder):
    packed, plain = pair(folder)
    largest = []
    for experts in (packed, plain):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, sizes=sizes: sizes.append(tensor.numel()) or tensor, id):
            routed(experts, torch.randn(8, 64, requires_grad=True))
        largest.append(max(sizes))
    assert largest[0] < plain.down_proj.numel() <= largest[1]


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "gate_proj", "up_proj", "down_proj"], ["gate_up_proj"]])
def test_adapters_of_4_bit_experts_have_peft_s_products_and_gradients(folder, targets):
    results = []
    for four_bit in (True, False):
        wanted = settings(str(folder), load_in_4bit=four_bit, target_modules=targets)
        model = build_base(wanted, load_config(wanted), device="cpu", weights=True)
        if not four_bit:
            with torch.no_grad():
                for name in WEIGHTS:
                    getattr(experts_of(model), name).copy_(results[0][0][name])
        weights = {name: dequantised(getattr(experts_of(model), name)) for name in WEIGHTS} if four_bit else {}
        adapted = attach_adapters(model, wanted)
        torch.manual_seed(2)
        for _, parameter in trainable_parameters(adapted):
            torch.nn.init.normal_(parameter, std=0.1)
        torch.manual_seed(3)
        out = routed(experts_of(adapted.get_base_model()), torch.randn(24, 64, requires_grad=True))
        out.square().sum().backward()
        grads = [(n, p.grad) for n, p in trainable_parameters(adapted) if ".experts." in n]
        results.append((weights, out, grads))
    (_, out, gradients), (_, expected, others) = results
    assert relative_distance(out, expected) < 1e-5
    assert bool(gradients) == (targets != "all-linear" or "gpt_oss" not in str(folder))
    for (name, grad), (other, reference) in zip(gradients, others, strict=True):
        assert name == other
        assert relative_distance(grad, reference) < 1e-4, name


def test_mxfp4_experts_become_nf4_while_loading(tmp_path):
    config = AutoConfig.for_model("gpt_oss", **MIXTURE, **KINDS["gpt_oss"])
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(WEIGHTS)]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(118, 122, (experts, outputs, inputs // 32), dtype=torch.uint8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization_config": {"quant_method": "mxfp4"}}))
    packed, plain = (experts_of(loaded(tmp_path, load_in_4bit=bits, dtype="bfloat16")) for bits in (True, False))
    for name in WEIGHTS:
        assert relative_distance(dequantised(getattr(packed, name)).float(), getattr(plain, name).float()) < 0.12


def test_fp8_weights_are_trained_in_16_bit(tmp_path):
    config = AutoConfig.for_model("llama", **{**MIXTURE, "hidden_size": 128})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    originals = {name: value for name, value in tensors.items() if name.endswith("_proj.weight")}
    for name, value in originals.items():
        tensors[name] = (value.float() / 2**-10).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.full([-(-size // 128) for size in value.shape], 2.0**-10)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((tmp_path / "config.json").read_text())
    stored = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**values, "quantization_config": stored}))
    parameters = dict(loaded(tmp_path, load_in_4bit=False, dtype="bfloat16").named_parameters())
    for name, value in originals.items():
        assert parameters[name].dtype == torch.bfloat16
        assert relative_distance(parameters[name].float(), value.float()) < 0.04


def test_a_mixture_stored_by_bitsandbytes_names_the_original():
    stored = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    wanted = settings("unsloth/Qwen3-30B-A3B-bnb-4bit")
    values = {"model_type": "qwen3_moe", **MIXTURE, **KINDS["qwen3_moe"], "quantization_config": stored}
    with pytest.raises(RecipeError, match="each expert by itself") as caught:
        build_base(wanted, config_from(values, wanted), device="cpu", weights=False)
    assert caught.value.fix.startswith("Give Qwen/Qwen3-30B-A3B; load_in_4bit=true")


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_a_checkpoint_packed_for_inference_names_the_original(method):
    wanted = settings(f"/models/Qwen3-8B-{method}", load_in_4bit=True)
    values = {"model_type": "llama", **MIXTURE, "quantization_config": {"quant_method": method}}
    for bits in (True, False):
        with pytest.raises(RecipeError, match=method) as caught:
            build_base(resolved(wanted, load_in_4bit=bits), config_from(values, wanted), device="cpu", weights=False)
        assert caught.value.fix == (
            "Give Qwen/Qwen3-8B; load_in_4bit=true quantises it while loading."
            if method != "compressed-tensors"
            else "Give the 16-bit model; load_in_4bit=true quantises it while loading."
        )


MAMBA = {"num_attention_heads": 1, "num_heads": 4, "head_dim": 32, "n_groups": 1}
LARGE = {"num_attention_heads": 4, "num_experts": 64, "moe_intermediate_size": 2**15, "hidden_size": 1024, "head_dim": 32}


@pytest.mark.parametrize(
    ("kind", "sizes", "bits", "reason"),
    [
        ("mamba2", MAMBA, 4, None),
        ("qwen3_moe", {**LARGE, "moe_intermediate_size": 128}, 8, "by load_in_4bit only"),
        ("qwen3_moe", LARGE, 4, "one tensor of 4,294,967,296 values, and bitsandbytes quantises at most 2,147,483,647"),
        ("llama4_text", {"num_attention_heads": 4, "num_local_experts": 4}, 4, "as llama4_text stores and computes them"),
    ],
)
def test_the_reason_why_experts_stay_16_bit_is_theirs(kind, sizes, bits, reason):
    values = {"model_type": kind, "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 256, **sizes}
    recipe = plainest(
        recipe_from({"model_name_or_path": "x/y", "dataset": "rows.jsonl", "dtype": "bfloat16", f"load_in_{bits}bit": True})
    )
    config = config_from(values, recipe)
    model = build_on_meta(config, None, dtype=torch.bfloat16, attention=None)
    stated = why_experts_stay_16_bit(model, config, recipe)
    assert stated is None if reason is None else reason in stated


@pytest.mark.parametrize(
    ("kind", "read"), [("mamba", {"dt_proj", "lm_head"}), ("gemma3n_text", {"prediction_coefs"}), ("llama", set())]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_layers_whose_weights_others_read_stay_16_bit(kind, read, bits):
    recipe = plainest(
        recipe_from({"model_name_or_path": "x/y", "dataset": "d", "dtype": "bfloat16", f"load_in_{bits}bit": True})
    )
    quantization = quantization_config(recipe, CONFIG_MAPPING[kind]())
    assert read <= set(quantization.llm_int8_skip_modules or []) and (read or not quantization.llm_int8_skip_modules)
