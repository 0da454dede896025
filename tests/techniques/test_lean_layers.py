"""Lean layers: the gradients of the ordinary layers up to rounding, and no worse ones, for about half the bytes."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch
from lean_models import COMMON, FAMILIES, adapter_gradients, cast, error, fill_adapters, gradients, model_of, tokens
from peft import get_peft_model_state_dict
from tiny_training import BASES, RECOMPUTED, adapted, autocast, batch, forecast_saved_bytes, saved_bytes, settings_for
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from finetune.layers import rotary
from finetune.layers.checkpointing import decoder_layers
from finetune.layers.lean_layers import gated_parts, lean_summary, make_lean, norm_form, undo_lean
from finetune.model.techniques import apply_techniques, step_context

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Rounding may send a token to other experts, which is no rounding error: all experts take every token here. More draws,
#: against fp32, as their grouped kernels have no fp64.
ROUTED = ("qwen3_moe",)
FEW = ("llama", "gemma3_text", "phi3")
SOME = [family if family in FEW else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES]
ADAPTED = [("llama", ["q_proj", "v_proj"]), ("llama", ["k_proj", "down_proj"]), ("llama", ["gate_proj"])]


@pytest.mark.parametrize(("family", "targets"), [*((family, None) for family in FAMILIES), *ADAPTED], ids=str)
def test_gradients_in_fp32_are_those_of_peft(family, targets):
    model = model_of(family, **({"target_modules": targets} if targets else {}))
    peft, lean = gradients(model, tokens(), lean=False), gradients(model, tokens(), lean=True)
    assert targets or all(lean_summary(layer) == FAMILIES[family][1] for layer in decoder_layers(model))
    assert 0 < error(lean, peft) <= 1e-6
    assert torch.equal(gradients(model, tokens(), lean=False), peft)


@pytest.mark.slow
@pytest.mark.parametrize("half", HALF)
@pytest.mark.parametrize("family", SOME)
def test_gradients_in_16_bit_are_no_further_from_fp64_than_pefts(family, half):
    exact, off = torch.float32 if family in ROUTED else torch.float64, []
    for seed in range(10 if family in ROUTED else 4):
        model, ids = model_of(family, seed), tokens(seed)
        for router in (module for module in model.modules() if hasattr(module, "top_k")):
            router.top_k = router.num_experts
        reference, rounded = gradients(cast(model, exact), ids, exact), cast(model, HALF[half])
        off.append([error(gradients(rounded, ids, HALF[half], lean=lean), reference) for lean in (True, False)])
    lean, peft = zip(*off, strict=True)
    assert mean(lean) <= 1.05 * mean(peft)


@pytest.mark.parametrize("family", FAMILIES)
def test_rope_is_lean_in_16_bit_wherever_the_summary_has_it(family, monkeypatch):
    model, calls, rotated = cast(model_of(family), torch.bfloat16), [], rotary._rotated
    monkeypatch.setattr(rotary, "_rotated", lambda *inputs: calls.append(inputs) or rotated(*inputs))
    gradients(model, tokens(), torch.bfloat16, lean=True)
    lean_layers = sum("1 RoPE" in lean_summary(layer) for layer in decoder_layers(model))
    assert len(calls) == 4 * lean_layers  # of q and k, forward and backward


@pytest.fixture
def nf4(base):
    """An NF4 model with adapters in bf16."""
    model = adapted(settings_for(base, **BASES["nf4"]))
    fill_adapters(model)
    return model


def test_gradients_of_a_4_bit_model_are_no_further_from_fp64_than_pefts(nf4):
    off = []
    for seed in range(4):
        reference = gradients(cast(nf4, torch.float64), tokens(seed), torch.float64)
        off.append([error(gradients(nf4, tokens(seed), torch.bfloat16, lean=lean), reference) for lean in (True, False)])
    lean, peft = zip(*off, strict=True)
    assert mean(lean) <= 1.05 * mean(peft)


def step(model, wanted, **changes):
    wanted = wanted.model_copy(update={"lean_layers": True, **changes})
    apply_techniques(model, wanted)
    model.zero_grad()
    with step_context(wanted, "cpu"):
        with autocast(wanted):
            loss = model(**batch(0)).loss
        loss.backward()
    return adapter_gradients(model)


@pytest.mark.parametrize("kind", BASES)
def test_each_technique_gives_the_same_gradients_to_the_bit(base, kind):
    wanted = settings_for(base, **BASES[kind])
    model = adapted(wanted)
    fill_adapters(model)
    plain = step(model, wanted)
    assert [name for name, more in RECOMPUTED.items() if not torch.equal(step(model, wanted, **more), plain)] == []


@pytest.mark.parametrize(("kind", "most"), [("lora", 0.75), ("nf4", 0.7)])
def test_fewer_bytes_are_saved_and_the_forecast_saves_those_of_the_run(base, kind, most):
    eager = {"attn_implementation": "eager"}  # a CPU's fused attention keeps other tensors than a card's
    lean, ordinary = (
        saved_bytes(settings_for(base, **BASES[kind], **eager, lean_layers=lean_layers)) for lean_layers in (True, False)
    )
    assert lean <= most * ordinary
    assert forecast_saved_bytes(base, kind, {"lean_layers": True}, **eager) == [pytest.approx(lean, rel=0.002)]


@pytest.mark.parametrize("has_dropout", [True, False], ids=["dropout", "a hook"])
def test_linear_layers_in_another_state_run_as_before(has_dropout):
    model = model_of("llama")
    for module in model.modules():
        if hasattr(module, "lora_A") and has_dropout:
            module.lora_dropout["default"] = torch.nn.Dropout(0.5)
        elif hasattr(module, "lora_A"):
            module.lora_A["default"].register_forward_hook(lambda *_: None)
    for layer in decoder_layers(model):
        layer.input_layernorm = torch.nn.Identity()
        layer.post_attention_layernorm = torch.nn.Identity()
        layer.self_attn.forward = layer.self_attn.forward  # not to be replaced: its RoPE stays as before, too
    torch.manual_seed(1)
    peft = gradients(model, tokens(), lean=False)
    torch.manual_seed(1)
    assert torch.equal(gradients(model, tokens(), lean=True), peft)


def test_answers_and_evaluations_are_those_of_ordinary_layers_and_backward_may_run_twice(nf4):
    with torch.no_grad():
        ordinary = nf4(input_ids=tokens()).logits
        make_lean(decoder_layers(nf4))
        assert torch.equal(nf4(input_ids=tokens()).logits, ordinary)
    with nf4.disable_adapter(), torch.autocast("cpu", torch.bfloat16):
        without = nf4(input_ids=tokens()).logits
        undo_lean(decoder_layers(nf4))
        assert error(without, nf4(input_ids=tokens()).logits) < 0.02
    make_lean(decoder_layers(nf4))
    first, second = gradients(nf4, tokens(1), torch.bfloat16), gradients(nf4, tokens(2), torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        losses = [nf4(input_ids=tokens(seed), labels=tokens(seed)).loss for seed in (1, 2)]
        nf4.zero_grad()
        losses[0].backward(retain_graph=True)  # inside autocast
    assert torch.equal(adapter_gradients(nf4), first)
    nf4.zero_grad()
    losses[1].backward()
    assert torch.equal(adapter_gradients(nf4), second)
    nf4.zero_grad()
    losses[0].backward()
    assert torch.equal(adapter_gradients(nf4), first)


def test_a_lean_model_is_saved_copied_and_merged_as_any_other_and_its_outputs_may_be_changed_in_place():
    model = model_of("llama")
    saved = get_peft_model_state_dict(model)
    make_lean(decoder_layers(model))
    assert all(torch.equal(value, saved[name]) for name, value in get_peft_model_state_dict(model).items())
    layer = decoder_layers(copy.deepcopy(model))[0]
    assert layer.mlp.forward.__self__ is layer.mlp
    with torch.no_grad():
        adapted_logits = model(input_ids=tokens()).logits
        assert error(model.merge_and_unload()(input_ids=tokens()).logits, adapted_logits) < 1e-5

    def gradients_of(lean):
        model = model_of("llama")
        apply_techniques(model, settings_for("none", lean_layers=lean))
        activations = torch.ones(1, 3, 64, requires_grad=True)
        output = next(module for name, module in model.named_modules() if name.endswith("q_proj"))(activations)
        output += 1
        output.square().sum().backward()
        return activations.grad

    torch.testing.assert_close(gradients_of(lean=True), gradients_of(lean=False))


class Norm(torch.nn.Module):
    def __init__(self, power=2, eps=1e-5):
        super().__init__()
        self.weight, self.eps, self.power = torch.nn.Parameter(torch.ones(64), requires_grad=False), eps, power

    def forward(self, x):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.abs().pow(self.power).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Mlp(torch.nn.Module):
    def __init__(self, act, limit=1e9, names="wvu"):
        super().__init__()
        self.act, self.limit, self.names = act, limit, names
        for name in names[:2]:
            setattr(self, name, torch.nn.Linear(8, 12))
        setattr(self, names[2], torch.nn.Linear(12, 8))

    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act(gate(x)) * up(x).clamp(max=self.limit))


class DroppingMlp(Mlp):
    def forward(self, x):
        gate, up, down = (getattr(self, name) for name in self.names)
        return torch.nn.functional.dropout(down(self.act(gate(x)) * up(x)), p=0.1, training=self.training)


def test_what_computes_the_same_as_it_trains_is_recognised_whatever_its_names():
    assert norm_form(Norm()) == (False, False, False)
    assert gated_parts(Mlp(torch.nn.SiLU())).linears == ("w", "v", "u")
    assert gated_parts(Mlp(torch.nn.GELU(), names="uvw")).linears == ("u", "v", "w")
    assert gated_parts(DroppingMlp(torch.nn.SiLU()).eval()) is None


@pytest.mark.parametrize("module", [Norm(power=3), Mlp(torch.nn.ReLU()), Mlp(torch.nn.SiLU(), limit=7.0)], ids=str)
def test_what_computes_otherwise_is_not_recognised(module):
    assert norm_form(module) is None and gated_parts(module) is None


HYBRID = FAMILIES["qwen3_5_text"][0] | {"layer_types": ["linear_attention", "full_attention"]}


def passes(block, inputs, grad):
    """Output, gradient of the input, and bytes saved for it."""
    saved, x = [], inputs.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda part: saved.append(part) or part, lambda part: part):
        (out := block(x)).backward(grad)
    storages = {part.untyped_storage()._cdata: part.untyped_storage().nbytes() for part in saved}
    return out, x.grad, sum(storages.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"])
def test_outputs_and_gradients_are_transformers_to_the_bit(kind, dtype):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**COMMON | HYBRID), dtype=dtype).requires_grad_(False)
    block = next(module for module in model.train().modules() if type(module).__name__.endswith("GatedDeltaNet"))
    for parameter in block.parameters():
        parameter.add_(0.3 * torch.randn_like(parameter))
    inputs, grad = torch.randn(2, 2, 160, 64, dtype=dtype)
    *theirs, most = passes(block, inputs, grad)
    make_lean([block])
    assert lean_summary(block) == "1 short convolution, 1 norm"
    *ours, saved = passes(block, inputs, grad)
    assert all(map(torch.equal, ours, theirs))
    if dtype == torch.bfloat16:  # 10 bytes a value and 2 a channel: for a block of Qwen3.5-4B 112 MiB less on 2,048 tokens
        assert most - saved == pytest.approx(320 * (10 * 96 + 2 * 160), rel=0.05)
    with pytest.raises(ValueError, match="packed"):  # as before, without a kernel that keeps rows apart
        block(inputs.requires_grad_(), seq_idx=torch.zeros(2, 160, dtype=torch.int32))


def test_a_toy_trains_to_the_same_losses_and_generates_the_same(monkeypatch):
    monkeypatch.setitem(FAMILIES, "qwen3_5_text", (HYBRID, ""))

    def trained(**changes):
        model, losses = model_of("qwen3_5_text"), []
        apply_techniques(model, settings_for("none", **changes))
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        for step in range(5):
            optimizer.zero_grad()
            losses.append(model(input_ids=tokens(step), labels=tokens(step)).loss)
            losses[-1].backward()
            optimizer.step()
        answers = model.eval().generate(input_ids=tokens(), max_new_tokens=4, do_sample=False, use_cache=True)
        return [loss.item() for loss in losses], answers.tolist()

    ordinary, lean = trained(), trained(lean_layers=True)
    assert lean == (pytest.approx(ordinary[0], rel=1e-5), ordinary[1])
    assert trained(lean_layers=True, activation_checkpointing=True) == lean


NF4_KERNEL = """
import bitsandbytes.functional as bnb
import torch

from finetune.layers.nf4_kernel import dequantise

#: One block, blocks that end within a program, several programs, and more than a block of nested scales.
SHAPES = ((1, 64), (3, 64), (40, 96), (33, 64), (130, 256))

levels = bnb.get_4bit_type("nf4", device="cpu")
count = 0
for rows, columns in SHAPES:
    for block in (64, 128):
        for is_nested in (False, True):
            weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.05
            packed, state = bnb.quantize_4bit(weight, blocksize=block, quant_type="nf4", compress_statistics=is_nested)
            nested = (state.state2.absmax, state.state2.code, state.offset) if is_nested else ()
            for dtype in (torch.float32, torch.float16):  # the interpreter rounds to bfloat16 by cutting
                state.dtype = dtype
                out = torch.full((rows, columns), float("nan"), dtype=dtype)
                dequantise(packed, state.absmax, nested, levels, out, block)
                assert torch.equal(out, bnb.dequantize_4bit(packed, state)), (rows, columns, block, is_nested, dtype)
                count += 1
print(count)
"""


@pytest.mark.standin
def test_the_kernel_gives_the_bits_of_bitsandbytes_for_all_shapes():
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_INTERPRET": "1"}
    process = subprocess.run([sys.executable, "-c", NF4_KERNEL], env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split()[-1] == "40"
