"""Batches padded on the right are given to a model without their mask only where it changes no real token."""

import pytest
import torch
from one_step import random_model
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from families import FAMILIES, config_values
from finetune.compat.trl import add_loss
from finetune.model.padding import needs_padding_mask, without_mask
from finetune.model.transformers_config import config_from
from finetune.recipe import recipe_from

#: Their routers' balance loss leaves padding out; their state or convolution does; they have attention code of their own.
BALANCED = {"gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe"}
HYBRID = {"falcon_h1", "granitemoehybrid", "lfm2", "lfm2_moe", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next"}
OTHERS = {"falcon", "gpt2"}
#: Experts sum a token's gradient among those of padding, which are 0, in another order.
SORTED = {"deepseek_v3", "glm4_moe", "glm4_moe_lite"}
LENGTHS = (40, 70, 9)


def config_of(family, **changes):
    return config_from(config_values(family) | changes, recipe_from({"model_name_or_path": family, "dataset": "rows.jsonl"}))


def model_of(family, attention):
    """With random weights, large enough that what a token sees changes its loss."""
    model = random_model(config_values(family), attention, scale=3)
    add_loss(model)
    return model.train()


def losses_and_gradients(model, inputs):
    torch.manual_seed(0)  # of dropout
    losses = model(**inputs, fused_lm_head=True).log_probs
    losses.sum().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return losses.detach(), gradients


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_is_left_out_where_only_causal_attention_reads_it(family):
    assert needs_padding_mask(config_of(family)) == (family in BALANCED | HYBRID | OTHERS)


def test_no_balance_loss_needs_no_mask_attention_to_later_tokens_does_and_other_code_is_not_run(monkeypatch):
    assert not needs_padding_mask(config_of("qwen3_moe", router_aux_loss_coef=0.0))
    assert needs_padding_mask(config_of("llama", is_causal=False))
    run = []
    monkeypatch.setattr("transformers.models.auto.auto_factory.get_class_from_dynamic_module", lambda *code: run.append(code))
    config = config_of("llama", auto_map={"AutoModelForCausalLM": "somebody/else--modeling.Model"})
    assert not needs_padding_mask(config) and run == []


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - BALANCED - HYBRID - OTHERS))
def test_losses_and_gradients_are_the_same_without_the_mask(family):
    model = model_of(family, "eager")
    torch.manual_seed(1)
    rows = [{"input_ids": torch.randint(9, 2000, (length,)).tolist()} for length in LENGTHS]
    inputs = DataCollatorForLanguageModeling(pad_token_id=0)(rows)
    losses, gradients = losses_and_gradients(model, inputs)
    without, gradients_without = losses_and_gradients(model, without_mask(inputs))
    assert torch.equal(losses, without) and losses.count_nonzero() == sum(LENGTHS) - len(LENGTHS)
    assert gradients.keys() == gradients_without.keys()
    rtol = 1e-6 if family in SORTED else 0
    differences = {name: (gradients_without[name] - gradient).norm() for name, gradient in gradients.items()}
    assert all(differences[name] <= rtol * gradient.norm() for name, gradient in gradients.items())
