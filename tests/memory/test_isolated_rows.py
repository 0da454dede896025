"""Packed rows of a hybrid model: a state or a convolution that crosses a row's end is found, however fast the state decays."""

from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from families import config_values
from finetune.errors import RecipeError
from finetune.layers.packed_rows import MOST_SHARED_CHANGE, changes_with_other_row, require_isolated_rows

PACK = DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)
CONVOLUTION, RULE = qwen3_5.causal_conv1d_fn, qwen3_5.torch_chunk_gated_delta_rule


def convolution(leaks, states, *weights, seq_idx, activation, **_):
    counts = [states.shape[2]] if leaks else seq_idx[0].unique_consecutive(return_counts=True)[1].tolist()
    return torch.cat([CONVOLUTION(row, *weights, activation=activation) for row in states.split(counts, dim=2)], dim=2)


def rule(leaks, *states, cu_seqlens, g, beta, **_):
    counts = [g.shape[1]] if leaks else cu_seqlens.diff().tolist()
    rows = zip(*(part.split(counts, dim=1) for part in (*states, g, beta)), strict=True)
    return torch.cat([RULE(*row, use_qk_l2norm_in_kernel=True)[0] for row in rows], dim=1), None


def toy(monkeypatch, decay, leaking=None, dtype=torch.float32):
    """Qwen3.5 with one of its parts, or none, computed over the ends of rows; `decay`: the logarithm of the state's rate."""
    monkeypatch.setattr(qwen3_5, "causal_conv1d_fn", partial(convolution, leaking == "convolution"))
    monkeypatch.setattr(qwen3_5, "torch_chunk_gated_delta_rule", partial(rule, leaking == "state"))
    torch.manual_seed(0)
    model = qwen3_5.Qwen3_5ForCausalLM(qwen3_5.Qwen3_5TextConfig(**config_values("qwen3_5")["text_config"])).to(dtype)
    for layer in model.model.layers[:3]:
        layer.linear_attn.A_log.data.fill_(decay)
    return get_peft_model(model, LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_kept_apart_do_not_change_at_all(monkeypatch, dtype):
    model = toy(monkeypatch, decay=-3, dtype=dtype)
    require_isolated_rows(model, PACK)
    assert changes_with_other_row(model.get_base_model(), PACK).max() == 0


@pytest.mark.parametrize("leaking", ["state", "convolution"])
@pytest.mark.parametrize("decay", [-3, 1.5])
def test_a_state_or_a_convolution_that_crosses_a_rows_end_is_found(monkeypatch, leaking, decay):
    model = toy(monkeypatch, decay, leaking)
    with pytest.raises(RecipeError, match="depends on the example before it in this qwen3_5_text model"):
        require_isolated_rows(model, PACK)
    if (leaking, decay) == ("state", 1.5):  # the median over a row's tokens would not show it
        assert changes_with_other_row(model.get_base_model(), PACK)[:16].median() < MOST_SHARED_CHANGE / 1000
