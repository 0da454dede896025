"""Only experts with rows are dequantised; the lean forward's step is that of the experts one by one, and saves less."""

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from transformers import AutoConfig, AutoModelForCausalLM

import finetune.layers.routed_experts as routed
from finetune.layers.lean_layers import lean_summary
from finetune.model.adapters import attach_adapters, trainable_parameters
from finetune.model.build import build_base
from finetune.model.techniques import apply_techniques
from finetune.model.transformers_config import load_config
from finetune.recipe import recipe_from
from finetune.settings import plainest

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "head_dim": 16,
}  # fmt: skip
#: The routing of Qwen3-30B-A3B and gpt-oss-20b, at small widths.
KINDS = {
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "gpt_oss": {"num_local_experts": 32, "num_experts_per_tok": 4},
}
EXPERTS = {"qwen3_moe": 128, "gpt_oss": 32}
ALL = ["q_proj", "gate_proj", "up_proj", "down_proj"]
ROUTERS = {"qwen3_moe": "gate", "gpt_oss": "router"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    saved = {}
    for kind, more in KINDS.items():
        torch.manual_seed(0)
        saved[kind] = tmp_path_factory.mktemp(kind)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **TINY, **more), dtype=torch.float32)
        for name, weight in model.named_parameters():
            if "proj_bias" in name:
                torch.nn.init.normal_(weight, std=0.5)
        model.save_pretrained(saved[kind])
    return saved


def adapted(folder, targets=ALL, **more):
    values = {"model_name_or_path": str(folder), "dataset": "rows.jsonl", "lora_r": 4, "dtype": "float32", "load_in_4bit": True}
    more = {
        "load_in_8bit": False,
        "activation_checkpointing": False,
        "attn_implementation": "eager",
        "lora_dropout": 0.0,
        **more,
    }
    wanted = plainest(recipe_from({**values, "target_modules": targets, **more}))
    model = attach_adapters(build_base(wanted, load_config(wanted), device="cpu", weights=True), wanted).train()
    torch.manual_seed(2)
    for _, parameter in trainable_parameters(model):
        torch.nn.init.normal_(parameter, std=0.1)
    apply_techniques(model, wanted)
    return model


def step(model, tokens=24):
    """Loss, router logits, and the gradients of all adapters, of one batch."""
    torch.manual_seed(3)
    batch = torch.randint(0, 256, (2, tokens))
    out = model(input_ids=batch, labels=batch, output_router_logits=True)
    out.loss.backward()
    return out, {name: parameter.grad.clone() for name, parameter in trainable_parameters(model)}


def distance(values, reference):
    return ((values - reference).norm() / reference.norm().clamp(min=1e-30)).item()


def experts_of(model):
    layer = model.get_base_model().model.layers[0]
    return next(module for module in layer.modules() if "has_gate" in vars(module))


def one_by_one(model):
    """Let the experts compute with dequantised weights by transformers' loop over experts."""
    from peft.tuners.lora.layer import ParamWrapper

    for module in model.modules():
        if "forward" in vars(module) and hasattr(module, "has_gate"):
            del module.forward
            module.config._experts_implementation = "eager"
            for name in ("gate_up_proj", "down_proj"):
                weight = getattr(module, name)
                module._parameters[name] = torch.nn.Parameter(dequantize_4bit(weight.data, weight.quant_state), False)
    assert any(isinstance(module, ParamWrapper) for module in model.modules())
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_that_of_the_experts_one_by_one_with_the_balance_loss(folders, kind):
    targets = [*ALL, ROUTERS[kind]]
    out, grads = step(adapted(folders[kind], targets, lean_layers=True))
    plain, reference = step(one_by_one(adapted(folders[kind], targets)))
    assert abs(out.loss.item() - plain.loss.item()) < 1e-5
    assert distance(out.aux_loss, plain.aux_loss) < 1e-5
    assert grads.keys() == reference.keys()
    assert sum(".experts." in name for name in grads) == 8
    assert sum(f".{ROUTERS[kind]}." in name for name in grads) == 4
    assert max(distance(grads[name], reference[name]) for name in grads) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpointing", [True, "selective"])
def test_a_recomputed_layer_routes_the_same_rows(folders, kind, checkpointing, monkeypatch):
    routings = []
    read = routed.read_ends
    monkeypatch.setattr(routed, "read_ends", lambda offsets: routings.append(offsets.tolist()) or read(offsets))
    _, reference = step(adapted(folders[kind], lean_layers=True))
    forward = routings[:]
    routings.clear()
    _, grads = step(adapted(folders[kind], lean_layers=True, activation_checkpointing=checkpointing))
    assert routings == [*forward, *reversed(forward)]
    assert all(torch.equal(grads[name], reference[name]) for name in grads)


def dequantised_bytes(model, monkeypatch, tokens):
    """Bytes of fused weights that a step dequantises, and the numbers of used experts of its layers."""
    sizes, used = [], []
    dequantise, read = routed.dequantised, routed.read_ends

    def counted(*arguments):
        weight = dequantise(*arguments)
        sizes.append(weight.nbytes)
        return weight

    def noted(offsets):
        used.append(len(torch.unique(offsets[offsets > 0])))
        return read(offsets)

    monkeypatch.setattr(routed, "dequantised", counted)
    monkeypatch.setattr(routed, "read_ends", noted)
    step(model, tokens)
    monkeypatch.undo()
    return sum(sizes), sum(used)


@pytest.mark.parametrize("kind", KINDS)
def test_dequantised_bytes_of_a_step_are_proportional_to_the_used_experts(folders, kind, monkeypatch):
    model = adapted(folders[kind], lean_layers=True)
    both = sum(getattr(experts_of(model), name).quant_state.shape.numel() for name in ("gate_up_proj", "down_proj"))
    seen = []
    for tokens in (1, 2, 4):
        dequantised, used = dequantised_bytes(model, monkeypatch, tokens)
        assert dequantised == 2 * used * both * 4 // EXPERTS[kind]  # forward and backward, 4 bytes a value
        seen.append(used)
    assert seen[0] < seen[1] < seen[2] < 1.5 * EXPERTS[kind]
    assert seen[0] <= EXPERTS[kind]


@pytest.mark.parametrize("used", [[0], [3], [1, 2], [0, 2, 3], [0, 1, 2, 3]])
def test_weights_of_used_experts_are_those_of_the_whole(folders, used):
    weight = experts_of(adapted(folders["gpt_oss"])).gate_up_proj
    counts = torch.zeros(32, dtype=torch.int32)
    counts[used] = 5
    offsets = counts.cumsum(0, dtype=torch.int32)
    ranges = routed.used_experts(offsets, offsets)
    part = routed.dequantised(weight, weight.quant_state, ranges)
    assert torch.equal(part, dequantize_4bit(weight.data, weight.quant_state)[used])
    assert ranges.offsets.tolist() == [5 * (at + 1) for at in range(len(used))]


def saved_elements(model):
    sizes = []
    experts = experts_of(model)
    hidden = torch.randn(32, 64, requires_grad=True)
    chosen = torch.randint(0, 32, (32, 4))
    scores = torch.rand(32, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: sizes.append(tensor.untyped_storage()) or tensor, id):
        experts(hidden, chosen, scores)
    return sum({storage.data_ptr(): storage.nbytes() for storage in sizes}.values())


def test_lean_experts_save_the_output_of_gate_and_up_and_their_input(folders):
    model = adapted(folders["gpt_oss"], targets=["q_proj"], lean_layers=True)
    assert "1 layer of 4-bit experts" in lean_summary(model.get_base_model().model.layers[0])
    before = saved_elements(adapted(folders["gpt_oss"], targets=["q_proj"]))
    rows = 32 * 4
    routing = 8 * 2 * rows + 4 * 32  # sorted experts and order, and where each one's rows end
    assert saved_elements(model) == 4 * (rows * 2 * 128 + 32 * 4) + routing
    assert before > 3 * saved_elements(model)


def test_frozen_rows_get_no_gradient_but_adapters_do(folders):
    experts = (
        adapted(folders["qwen3_moe"], targets=["down_proj"], lean_layers=True).get_base_model().model.layers[0].mlp.experts
    )
    out = experts(torch.randn(8, 64), torch.randint(0, 128, (8, 8)), torch.rand(8, 8))
    out.sum().backward()
    assert all(parameter.grad is not None for parameter in experts.parameters() if parameter.requires_grad)
