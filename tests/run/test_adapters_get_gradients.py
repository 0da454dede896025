"""Each adapter gets a gradient: none is on a layer whose weight transformers or mamba-ssm's kernel reads; else a run ends."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from families import FAMILIES, SHARED
from finetune.errors import RecipeError
from finetune.model.adapters import attach_adapters
from finetune.model.build import quantization_config
from finetune.model.language_model import model_class
from finetune.recipe import recipe_from
from finetune.run import training
from finetune.run.callbacks import require_gradients
from finetune.run.state import read_state
from finetune.settings import resolve_plain

#: Those that give the weight of `out_proj` to a kernel in training, and others.
FUSED = {
    "granitemoehybrid": FAMILIES["granitemoehybrid"], "bamba": {**SHARED["mamba"], "attn_layer_indices": [2]},
    "zamba2": {"num_mem_blocks": 1, "layers_block_type": ["mamba", "hybrid", "mamba"], "mamba_d_state": 16, "mamba_headdim": 32,
               "mamba_ngroups": 1, "n_mamba_heads": 16, "num_key_value_heads": 8},
}  # fmt: skip
OTHERS = {"mamba": {}, "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4}}
SETTINGS = resolve_plain(recipe_from({"model_name_or_path": "none", "dataset": "rows.jsonl", "load_in_4bit": True}))


def stepped(kind):
    """A small model after a backward pass, and the gradients of its adapters' B."""
    config = AutoConfig.for_model(kind, **SHARED["sizes"] | (FUSED | OTHERS)[kind])
    torch.manual_seed(0)
    base = model_class(config)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    model = attach_adapters(base, SETTINGS).train()
    ids = torch.randint(10, 100, (1, 40))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return model, {name: p.grad for name, p in model.named_parameters() if ".lora_B." in name}


@pytest.mark.parametrize("kind", FUSED | OTHERS)
def test_without_mamba_ssm_each_adapter_gets_a_gradient_other_than_0(kind):
    model, gradients = stepped(kind)
    assert [name for name, grad in gradients.items() if grad is None or not grad.any()] == []
    assert any(".out_proj." in name for name in gradients) == (kind != "mamba")
    require_gradients(model)


@pytest.mark.parametrize("kind", FUSED)
def test_with_mamba_ssm_out_proj_has_no_adapter_and_16_bit(tmp_path, monkeypatch, kind):
    def kernel(zxbcdt, *_, outproj_weight, **__):
        return torch.nn.functional.linear(zxbcdt[..., : outproj_weight.shape[1]], outproj_weight)

    monkeypatch.setattr(f"transformers.models.{kind}.modeling_{kind}.mamba2_split_conv1d_scan_combined", kernel)
    with pytest.raises(RecipeError, match="out_proj gets no gradient"):
        require_gradients(stepped(kind)[0])
    (tmp_path / "mamba_ssm").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    model, gradients = stepped(kind)
    assert all(grad is not None and grad.any() for grad in gradients.values())
    assert not any(".out_proj." in name for name in gradients) and any(".in_proj." in name for name in gradients)
    assert "out_proj" in quantization_config(SETTINGS, model.config).llm_int8_skip_modules


@pytest.mark.parametrize("bypassed", ["layers.0.experts.0.down_proj", "layers.0.attention.q_proj", None])
def test_a_module_that_does_not_run_is_not_asked_for_gradients(bypassed):
    run = [f"layers.0.{name}" for name in ("experts.0.up_proj", "experts.0.down_proj", "attention.q_proj")]
    idle = ["layers.0.experts.1.up_proj", "layers.1.attention.q_proj", "vision.projector.linear", "head.dense"]
    grads = {**dict.fromkeys(run, 1), **dict.fromkeys(idle), bypassed: None}
    parameters = [(f"{name}.lora_B.x", SimpleNamespace(grad=grad, requires_grad=bool(name))) for name, grad in grads.items()]
    with pytest.raises(RecipeError, match=f"{bypassed} gets no gradient") if bypassed else nullcontext():
        require_gradients(SimpleNamespace(named_parameters=lambda: parameters))


def test_a_run_with_a_bypassed_adapter_ends_and_names_it(make_run, train):
    def bypass():
        usual = training.RunTrainer.train

        def start(self, **arguments):
            layer = self.model.get_base_model().model.layers[1].self_attn.q_proj
            layer.forward = layer.base_layer.forward
            return usual(self, **arguments)

        training.RunTrainer.train = start

    assert train(run := make_run(), bypass) == 2
    message = read_state(run).message
    assert "model.layers.1.self_attn.q_proj gets no gradient" in message and "target_modules=[down_proj]" in message
