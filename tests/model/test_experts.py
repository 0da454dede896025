"""4-bit experts of mixtures: loaded from every form, the same products and gradients, and no 16-bit copies for backward."""

import functools

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from peft.tuners.lora.layer import ParamWrapper
from safetensors.torch import load_file
from small_models import SMALL, load, store_as_fp8, store_as_mxfp4
from small_models import settings as plain_settings
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from finetune.layers import experts as expert_layers
from finetune.layers.checkpointing import base_of
from finetune.layers.lean_layers import lean_summary
from finetune.model.adapters import attach_adapters, trainable_parameters
from finetune.model.build import quantization_config
from finetune.model.techniques import apply_techniques

#: A few experts of each form; and the routing of Qwen3-30B-A3B and gpt-oss-20b, at small widths.
FEW = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 192}, "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
}  # fmt: skip
MANY = {
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4},
}
EXPERTS, ROUTERS = {"qwen3_moe": 128, "gpt_oss": 32}, {"qwen3_moe": "gate", "gpt_oss": "router"}
WEIGHTS = ("gate_up_proj", "down_proj")
ALL = ["q_proj", "gate_proj", "up_proj", "down_proj"]


def config_of(kind, **sizes):
    return AutoConfig.for_model(kind, **{**SMALL, "head_dim": 16, "num_hidden_layers": 1, "num_experts_per_tok": 2, **sizes})


@pytest.fixture(scope="module", params=FEW)
def folder(request, tmp_path_factory):
    """A small mixture as transformers saves it: of Qwen3 and Mixtral each expert by itself, of gpt-oss fused."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    AutoModelForCausalLM.from_config(config_of(request.param, **FEW[request.param])).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Mixtures of many experts, with biases other than 0."""
    saved = {}
    for kind, more in MANY.items():
        torch.manual_seed(0)
        saved[kind] = tmp_path_factory.mktemp(kind)
        model = AutoModelForCausalLM.from_config(config_of(kind, **more, num_hidden_layers=2))
        for name, weight in model.named_parameters():
            if "proj_bias" in name:
                torch.nn.init.normal_(weight, std=0.5)
        model.save_pretrained(saved[kind])
    return saved


settings = functools.partial(plain_settings, dtype="float32", load_in_4bit=True, attn_implementation="eager")


def loaded(folder, **more):
    return load(settings(folder, **more))


def adapted(folder, targets=ALL, **more):
    """The model with adapters other than 0."""
    wanted = settings(folder, target_modules=targets, lora_dropout=0.0, **more)
    model = attach_adapters(load(wanted), wanted).train()
    torch.manual_seed(2)
    for _, parameter in trainable_parameters(model):
        torch.nn.init.normal_(parameter, std=0.1)
    apply_techniques(model, wanted)
    return model


def experts_of(model):
    return base_of(model).model.layers[0].mlp.experts


def packed_experts_of(model):
    """The same without PEFT's wrappers."""
    return next(module for module in base_of(model).model.layers[0].modules() if "has_gate" in vars(module))


def dequantised(weight):
    return dequantize_4bit(weight.data, weight.quant_state)


def relative_distance(values, reference):
    return ((values - reference).norm() / reference.norm().clamp(min=1e-30)).item()


def with_dequantised(model):
    """Let the experts compute by transformers' own forward, with the dequantised weights."""
    for module in model.modules():
        if "forward" in vars(module) and hasattr(module, "has_gate"):
            del module.forward
            for name in WEIGHTS:
                module._parameters[name] = torch.nn.Parameter(dequantised(getattr(module, name)), False)
    return model


def one_by_one(model):
    """The same by transformers' loop over experts."""
    base_of(model).config._experts_implementation = "eager"
    assert any(isinstance(module, ParamWrapper) for module in model.modules())
    return with_dequantised(model)


def pair(folder):
    """Experts in 4 bit, and the same with the dequantised weights."""
    return experts_of(loaded(folder)), experts_of(with_dequantised(loaded(folder)))


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


def test_products_and_gradients_are_those_of_the_dequantised_weights_and_backward_saves_none(folder):
    results, largest, (packed, plain) = [], [], pair(folder)
    for experts in (packed, plain):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor, sizes=sizes: sizes.append(tensor.numel()) or tensor, id):
            routed(experts, torch.randn(8, 64, requires_grad=True))
        largest.append(max(sizes))
        torch.manual_seed(1)
        hidden = torch.randn(24, 64, requires_grad=True)
        out = routed(experts, hidden)
        out.square().sum().backward()
        results.append((out, hidden.grad))
    assert all(relative_distance(*outputs) < 1e-5 for outputs in zip(*results, strict=True))
    assert largest[0] < plain.down_proj.numel() <= largest[1]


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "gate_proj", "up_proj", "down_proj"], ["gate_up_proj"]])
def test_adapters_of_4_bit_experts_have_peft_s_products_and_gradients(folder, targets):
    results = []
    for model in (adapted(folder, targets), with_dequantised(adapted(folder, targets))):
        torch.manual_seed(3)
        out = routed(experts_of(model), torch.randn(24, 64, requires_grad=True))
        out.square().sum().backward()
        results.append((out, {name: p.grad for name, p in trainable_parameters(model) if ".experts." in name}))
    (out, gradients), (expected, reference) = results
    assert relative_distance(out, expected) < 1e-5
    assert bool(gradients) == (targets != "all-linear" or "gpt_oss" not in str(folder))
    assert gradients.keys() == reference.keys()
    assert all(relative_distance(gradients[name], reference[name]) < 1e-4 for name in gradients)


def saved(folder, kind, **sizes):
    """Save a model in bf16; returns its tensors."""
    AutoModelForCausalLM.from_config(config_of(kind, **sizes), dtype=torch.bfloat16).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def test_mxfp4_experts_become_nf4_while_loading(tmp_path):
    saved(tmp_path, "gpt_oss", **FEW["gpt_oss"])
    store_as_mxfp4(tmp_path)
    packed, plain = (experts_of(loaded(tmp_path, load_in_4bit=bits, dtype="bfloat16")) for bits in (True, False))
    for name in WEIGHTS:
        assert relative_distance(dequantised(getattr(packed, name)).float(), getattr(plain, name).float()) < 0.12


def test_fp8_weights_are_trained_in_16_bit(tmp_path):
    originals = saved(tmp_path, "llama", hidden_size=128)
    store_as_fp8(tmp_path)
    parameters = dict(loaded(tmp_path, load_in_4bit=False, dtype="bfloat16").named_parameters())
    for name in (name for name in originals if name.endswith("_proj.weight")):
        assert parameters[name].dtype == torch.bfloat16
        assert relative_distance(parameters[name].float(), originals[name].float()) < 0.04


def step(model, tokens=24):
    """Loss, router logits, and the gradients of all adapters, of one batch."""
    torch.manual_seed(3)
    batch = torch.randint(0, 256, (2, tokens))
    out = model(input_ids=batch, labels=batch, output_router_logits=True)
    out.loss.backward()
    return out, {name: parameter.grad.clone() for name, parameter in trainable_parameters(model)}


@pytest.mark.parametrize("kind", MANY)
def test_a_step_is_that_of_the_experts_one_by_one_with_the_balance_loss(folders, kind):
    targets = [*ALL, ROUTERS[kind]]
    out, grads = step(adapted(folders[kind], targets, lean_layers=True))
    plain, reference = step(one_by_one(adapted(folders[kind], targets)))
    assert abs(out.loss.item() - plain.loss.item()) < 1e-5
    assert relative_distance(out.aux_loss, plain.aux_loss) < 1e-5
    assert grads.keys() == reference.keys()
    assert sum(".experts." in name for name in grads) == 8
    assert sum(f".{ROUTERS[kind]}." in name for name in grads) == 4
    assert max(relative_distance(grads[name], reference[name]) for name in grads) < 1e-4


@pytest.mark.parametrize("kind", MANY)
@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_a_recomputed_layer_routes_the_same_rows(folders, kind, checkpointing, monkeypatch):
    routings = []
    read = expert_layers.read_ends
    monkeypatch.setattr(expert_layers, "read_ends", lambda offsets: routings.append(offsets.tolist()) or read(offsets))
    _, reference = step(adapted(folders[kind], lean_layers=True))
    forward = routings[:]
    routings.clear()
    _, grads = step(adapted(folders[kind], lean_layers=True, activation_checkpointing=checkpointing))
    assert routings == [*forward, *reversed(forward)]
    assert all(torch.equal(grads[name], reference[name]) for name in grads)


@pytest.mark.parametrize("kind", MANY)
def test_dequantised_bytes_of_a_step_are_proportional_to_the_used_experts(folders, kind, monkeypatch):
    model = adapted(folders[kind], lean_layers=True)
    both = sum(getattr(packed_experts_of(model), name).quant_state.shape.numel() for name in ("gate_up_proj", "down_proj"))
    weights, used, seen = [], [], []
    dequantise, read = expert_layers.dequantised, expert_layers.read_ends
    monkeypatch.setattr(expert_layers, "dequantised", lambda *weight: weights.append(dequantise(*weight)) or weights[-1])
    monkeypatch.setattr(expert_layers, "read_ends", lambda ends: used.append(len(ends[ends > 0].unique())) or read(ends))
    for tokens in (1, 2, 4):
        weights.clear(), used.clear()
        step(model, tokens)
        # forward and backward, 4 bytes a value
        assert sum(weight.nbytes for weight in weights) == 2 * sum(used) * both * 4 // EXPERTS[kind]
        seen.append(sum(used))
    assert seen[0] < seen[1] < seen[2] < 1.5 * EXPERTS[kind]
    assert seen[0] <= EXPERTS[kind]


@pytest.mark.parametrize("used", [[0], [3], [1, 2], [0, 2, 3], [0, 1, 2, 3]])
def test_weights_of_used_experts_are_those_of_the_whole(folders, used):
    weight = packed_experts_of(adapted(folders["gpt_oss"])).gate_up_proj
    counts = torch.zeros(32, dtype=torch.int32)
    counts[used] = 5
    offsets = counts.cumsum(0, dtype=torch.int32)
    ranges = expert_layers.used_experts(offsets, offsets)
    part = expert_layers.dequantised(weight, weight.quant_state, ranges)
    assert torch.equal(part, dequantize_4bit(weight.data, weight.quant_state)[used])
    assert ranges.offsets.tolist() == [5 * (at + 1) for at in range(len(used))]


def saved_elements(model):
    sizes = []
    experts = packed_experts_of(model)
    hidden = torch.randn(32, 64, requires_grad=True)
    chosen = torch.randint(0, 32, (32, 4))
    scores = torch.rand(32, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.untyped_storage()) or tensor, id):
        experts(hidden, chosen, scores)
    return sum({storage.data_ptr(): storage.nbytes() for storage in sizes}.values())


def test_lean_experts_save_the_output_of_gate_and_up_and_their_input_and_only_adapters_get_gradients(folders):
    model = adapted(folders["gpt_oss"], targets=["q_proj"], lean_layers=True)
    assert "1 layer of 4-bit experts" in lean_summary(model.get_base_model().model.layers[0])
    before = saved_elements(adapted(folders["gpt_oss"], targets=["q_proj"]))
    rows = 32 * 4
    routing = 8 * 2 * rows + 4 * 32  # sorted experts and order, and where each one's rows end
    assert saved_elements(model) == 4 * (rows * 2 * 128 + 32 * 4) + routing
    assert before > 3 * saved_elements(model)
    experts = experts_of(adapted(folders["qwen3_moe"], targets=["down_proj"], lean_layers=True))
    out = experts(torch.randn(8, 64), torch.randint(0, 128, (8, 8)), torch.rand(8, 8))
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in experts.parameters() if parameter.requires_grad)


@pytest.mark.parametrize(
    ("kind", "read"), [("mamba", {"dt_proj", "lm_head"}), ("gemma3n_text", {"prediction_coefs"}), ("llama", set())]
)
@pytest.mark.parametrize("bits", [4, 8])
def test_layers_whose_weights_others_read_stay_16_bit(kind, read, bits):
    quantization = quantization_config(plain_settings(**{f"load_in_{bits}bit": True}), CONFIG_MAPPING[kind]())
    assert read <= set(quantization.llm_int8_skip_modules or []) and (read or not quantization.llm_int8_skip_modules)
