"""`torch_varlen`: packed rows attend only within themselves; unpacked batches use sdpa."""

import pytest
import torch
from tiny_training import Operators
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from finetune.compat.torch import varlen_shares_keys
from finetune.errors import RecipeError
from finetune.layers.varlen_attention import flash_supports_backward, register, varlen_attention

LENGTHS = [5, 17, 1, 30, 12]  # 65 tokens, unlike any dimension of the model


def model_for(attention: str, kind=LlamaConfig, dtype=torch.float32, **changes):
    register()
    torch.manual_seed(0)
    config = kind(
        hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, vocab_size=128,
        max_position_embeddings=128, **changes,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype).train()


def rows() -> list[dict]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 128, (length,), generator=generator).tolist()} for length in LENGTHS]


def packed() -> dict:
    return DataCollatorForLanguageModeling(pad_token_id=0, padding_free=True)(rows())


def summed_loss(model, inputs) -> torch.Tensor:
    labels = inputs["labels"]
    logits = model(**{name: value for name, value in inputs.items() if name != "labels"}).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")


def gradient(model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


SLIDING = {"kind": MistralConfig, "sliding_window": 6}


@pytest.mark.parametrize("form", [{"kind": LlamaConfig}, SLIDING])
def test_packed_and_padded_rows_have_the_loss_and_packed_ones_the_gradient_of_rows_alone(form):
    alone, together = model_for("sdpa", **form), model_for("torch_varlen", **form)
    collate, loss = DataCollatorForLanguageModeling(pad_token_id=0), summed_loss(together, packed())
    expected = sum(summed_loss(alone, collate([row])) for row in rows() if len(row["input_ids"]) > 1)
    expected.backward()
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.allclose(gradient(together), gradient(alone), rtol=1e-4, atol=1e-6)
    assert summed_loss(together, collate(rows())).item() == pytest.approx(expected.item(), rel=1e-6)


def test_boundaries_are_derived_from_the_positions_and_a_later_row_does_not_see_an_earlier_one():
    model, inputs = model_for("torch_varlen"), packed()
    expected = summed_loss(model, inputs).item()
    bare = {name: inputs[name] for name in ("input_ids", "labels", "position_ids")}
    assert summed_loss(model, bare).item() == pytest.approx(expected, rel=1e-6)
    model, inputs = model_for("torch_varlen").eval(), packed()
    arguments = {name: value for name, value in inputs.items() if name != "labels"}
    before = model(**arguments).logits
    arguments["input_ids"] = inputs["input_ids"].clone()
    arguments["input_ids"][0, : LENGTHS[0]] = 0
    after = model(**arguments).logits
    assert not torch.equal(after[:, : LENGTHS[0]], before[:, : LENGTHS[0]])
    assert torch.equal(after[:, LENGTHS[0] :], before[:, LENGTHS[0] :])


@pytest.mark.parametrize("names", [("position_ids",), ("position_ids", "cu_seq_lens_q", "max_length_q")], ids=str)
def test_the_host_reads_the_boundaries_once_a_micro_batch(names, monkeypatch):
    model, inputs, reads = model_for("torch_varlen"), packed(), []
    read = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: reads.append(tensor) or read(tensor))
    for micro_batches in (1, 2):
        micro_batch = {name: inputs[name].clone() if name != "max_length_q" else inputs[name] for name in ("input_ids", *names)}
        model(**micro_batch)
        assert len(reads) == micro_batches


def test_flash_trains_every_head_dimension_but_some_that_small_chips_have_no_room_for():
    consumer, data_centre = [(8, 6), (8, 9), (12, 0), (12, 1)], [(8, 0), (9, 0), (10, 0), (10, 3)]
    assert all(flash_supports_backward(head, capability) for head in (64, 192, 256) for capability in consumer + data_centre)
    assert not any(flash_supports_backward(head, capability) for head in (200, 224) for capability in consumer)
    assert all(flash_supports_backward(head, capability) for head in (200, 224) for capability in data_centre)


def test_batches_without_padding_and_generation_equal_sdpa():
    ours, theirs = model_for("torch_varlen").eval(), model_for("sdpa").eval()
    ids = torch.randint(0, 128, (3, 20), generator=torch.Generator().manual_seed(2))
    assert torch.allclose(ours(input_ids=ids).logits, theirs(input_ids=ids).logits, atol=1e-5)
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(ours.generate(ids, **arguments), theirs.generate(ids, **arguments))


NEWER = pytest.mark.skipif(not varlen_shares_keys(), reason="needs torch 2.12")


@pytest.mark.parametrize("shares_keys", [pytest.param(True, marks=NEWER), False], ids=["torch 2.12", "torch 2.11"])
def test_on_a_card_packed_rows_take_the_kernel_and_make_no_mask(shares_keys, monkeypatch):
    monkeypatch.setattr("finetune.layers.varlen_attention.varlen_shares_keys", lambda: shares_keys)
    inputs = packed()
    with FakeTensorMode() as mode, Operators() as seen:
        model = model_for("torch_varlen", dtype=torch.bfloat16)
        inputs = {name: mode.from_tensor(value) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
        summed_loss(model, inputs).backward()
    assert {"torch_attn._varlen_attn.default", "torch_attn._varlen_attn_backward.default"} <= seen.counts.keys()
    assert not any("scaled_dot_product" in name for name in seen.counts)
    assert not any(len(shape) > 1 and shape[-1] == shape[-2] == sum(LENGTHS) for shape in seen.shapes)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [({"softcap": 50.0}, "soft caps"), ({"s_aux": torch.zeros(4)}, "attention sinks"), ({"dropout": 0.1}, "attention dropout")],
)
def test_what_the_kernel_can_not_do_is_refused(arguments, problem):
    heads = torch.zeros(1, 4, 8, 16)
    with pytest.raises(RecipeError, match=problem):
        varlen_attention(torch.nn.Module(), heads, heads, heads, None, **arguments)
