"""Lean gated delta nets: transformers' gated norm and short convolution to the bit, for fewer saved bytes."""

import pytest
import torch
from lean_models import COMMON, FAMILIES, model_of, tokens
from tiny_training import settings_for
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from finetune.layers.lean_layers import lean_summary, make_lean
from finetune.model.techniques import apply_techniques

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
