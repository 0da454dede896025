"""RoPE as one autograd function: what the model's own function computes, and only where that is RoPE."""

import functools
import inspect

import pytest
import torch
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.glm4 import modeling_glm4
from transformers.models.llama import modeling_llama
from transformers.models.olmo2 import modeling_olmo2
from transformers.models.phi3 import modeling_phi3

from finetune.layers import rotary
from finetune.layers.rotary import rotary_forward

ATTENTIONS = {
    "a pair of tensors": modeling_llama.LlamaAttention,
    "one tensor": modeling_gemma4.Gemma4TextAttention,
    "part of a head": modeling_phi3.Phi3Attention,
}


def functions_of(attention):
    """What its lean forward calls, and what its own calls."""
    lean, own = (inspect.unwrap(forward) for forward in (rotary_forward(object.__new__(attention)), attention.forward))
    return lean.__globals__["_lean_apply_rotary_pos_emb"], own.__globals__["apply_rotary_pos_emb"]


def inputs(attention, dim, dtype=torch.float64, seed=0):
    """Heads of 16 before the tokens (dim 1) or after them (2); Phi-3 rotates half of a head, by any cos and sin."""
    torch.manual_seed(seed)
    shapes = [(2, 3, 5, 16), (2, 2, 5, 16)] if attention is not ATTENTIONS["one tensor"] else [(2, 3, 5, 16)]
    heads = [torch.randn(shape, dtype=dtype).transpose(1, dim).contiguous().requires_grad_() for shape in shapes]
    return heads, torch.randn(2, 2, 5, 8 if attention is ATTENTIONS["part of a head"] else 16, dtype=dtype).unbind()


def result(function, heads, turns, dim):
    out = function(*heads, *turns, unsqueeze_dim=dim)
    outs = out if isinstance(out, tuple) else (out,)
    return [*outs, *torch.autograd.grad(sum((tensor**2).sum() for tensor in outs), heads)]


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("kind", ATTENTIONS)
def test_lean_rope_computes_what_the_models_own_function_does(kind, dim):
    lean, own = functions_of(ATTENTIONS[kind])
    arguments = inputs(ATTENTIONS[kind], dim)
    ours, theirs = result(lean, *arguments, dim), result(own, *arguments, dim)
    assert "Rotary" in ours[0].grad_fn.name() and "Rotary" not in theirs[0].grad_fn.name()
    for tensor, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_16_bit_beside_fp32_angles_is_rotated_in_fp32_where_the_models_own_function_casts(half):
    (lean, own), off = functions_of(modeling_olmo2.Olmo2Attention), []
    for seed in range(50):
        heads, (cos, sin) = inputs(modeling_olmo2.Olmo2Attention, 1, half, seed)
        ours, theirs = (result(function, heads, (cos.float(), sin.float()), 1) for function in (lean, own))
        exact = result(own, [x.detach().double().requires_grad_() for x in heads], (cos.double(), sin.double()), 1)
        assert "Rotary" in ours[0].grad_fn.name() and all(x.dtype == half for x in ours)
        off.append([sum((x - best).norm().item() for x, best in zip(outs, exact, strict=True)) for outs in (ours, theirs)])
    assert 0 < sum(ours for ours, _ in off) <= sum(theirs for _, theirs in off)


OTHER_TENSORS = {
    "bfloat16": lambda heads, cos, sin: ([x.detach().bfloat16().requires_grad_() for x in heads], cos.float(), sin.float()),
    "angles with gradients": lambda heads, cos, sin: (heads, cos.requires_grad_(), sin),
    "one token": lambda heads, cos, sin: ([x[..., :1, :] for x in heads], cos, sin),
    "one row": lambda heads, cos, sin: ([x[:1] for x in heads], cos, sin),
}


@pytest.mark.parametrize("change", OTHER_TENSORS.values(), ids=OTHER_TENSORS)
def test_other_tensors_go_to_the_models_own_function(change):
    lean, own = functions_of(modeling_llama.LlamaAttention)
    heads, turns = inputs(modeling_llama.LlamaAttention, 1)
    heads, cos, sin = change(heads, *turns)
    ours, theirs = result(lean, heads, (cos, sin), 1), result(own, heads, (cos, sin), 1)
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_without_gradients_and_for_a_narrower_rotation_the_models_own_function_runs():
    lean, own = functions_of(modeling_llama.LlamaAttention)
    heads, turns = inputs(modeling_llama.LlamaAttention, 1, torch.bfloat16)
    with torch.no_grad():
        assert all(torch.equal(*pair) for pair in zip(lean(*heads, *turns), own(*heads, *turns), strict=True))
    heads, _ = inputs(modeling_llama.LlamaAttention, 1)
    with pytest.raises(RuntimeError, match="size of tensor"):
        lean(*heads, *torch.randn(2, 2, 5, 8, dtype=torch.float64))


@pytest.mark.parametrize("module", [modeling_glm4.Glm4Attention, modeling_llama.LlamaMLP, torch.nn.Linear], ids=str)
def test_what_rotates_otherwise_or_not_at_all_is_left_alone(module):
    assert rotary_forward(object.__new__(module)) is None


def test_an_interleaved_function_and_a_decorator_that_calls_by_other_means_are_left_alone():
    attention = object.__new__(modeling_deepseek_v3.DeepseekV3Attention)
    vars(attention)["config"] = modeling_deepseek_v3.DeepseekV3Config(rope_interleave=True)
    assert rotary_forward(attention) is None
    attention.config.rope_interleave = False
    assert rotary_forward(attention) is not None

    class Attention(modeling_llama.LlamaAttention):
        forward = functools.update_wrapper(lambda *_: None, inspect.unwrap(modeling_llama.LlamaAttention.forward))

    assert rotary_forward(object.__new__(Attention)) is None


rope = modeling_llama.apply_rotary_pos_emb
OTHER_FUNCTIONS = {
    "optional": lambda q, k=None, cos=None, sin=None, unsqueeze_dim=1: rope(q, k, cos, sin, unsqueeze_dim),
    "beside": lambda q, k, cos, sin, unsqueeze_dim=1, *, scale=1.0: rope(q, k, cos, sin, unsqueeze_dim),
    "elsewhere": lambda q, k, cos, sin, unsqueeze_dim=2: rope(q, k, cos, sin, unsqueeze_dim),
    "back": lambda q, k, cos, sin, unsqueeze_dim=1: rope(q, k, cos, -sin, unsqueeze_dim),
    "none": None, "built in": max,
}  # fmt: skip


@pytest.mark.parametrize("function", OTHER_FUNCTIONS.values(), ids=OTHER_FUNCTIONS)
def test_a_function_with_other_parameters_or_another_result_is_not_taken_for_it(function):
    assert rotary._form(modeling_llama.apply_rotary_pos_emb) and rotary._form(function) is None


class Decorated(modeling_llama.LlamaAttention):
    calls = []

    def record(function):
        @functools.wraps(function)
        def forward(*arguments, **named):
            Decorated.calls.append(named)
            return function(*arguments, **named)

        return forward

    forward = record(inspect.unwrap(modeling_llama.LlamaAttention.forward))


def test_a_decorator_of_the_forward_stays_around_lean_rope_and_a_later_patch_of_the_module_is_seen(monkeypatch):
    attention = Decorated(modeling_llama.LlamaConfig(hidden_size=32, num_attention_heads=2, num_key_value_heads=2), 0)
    hidden, angles = torch.randn(1, 5, 32), torch.randn(2, 1, 5, 16)
    lean, _ = rotary_forward(attention)(attention, hidden, position_embeddings=angles, attention_mask=None)
    expected, _ = attention(hidden, position_embeddings=angles, attention_mask=None)
    torch.testing.assert_close(lean, expected)
    assert [sorted(call) for call in Decorated.calls] == [["attention_mask", "position_embeddings"]] * 2
    forward = inspect.unwrap(rotary_forward(object.__new__(modeling_llama.LlamaAttention)))
    monkeypatch.setattr(modeling_llama, "eager_attention_forward", max)
    assert forward.__globals__["eager_attention_forward"] is max
