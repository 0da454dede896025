"""Rows are scored in batches by length: each row once, its answer in its place, the loss that of one row after another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.evaluate.score import batches
from finetune.evaluate.score import losses as losses_of


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_every_row_is_in_one_batch_that_is_not_too_large(lengths, most):
    made = batches(lengths, most)
    assert sorted(index for batch in made for index in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= most for batch in made)


def test_the_losses_of_a_batch_are_those_of_its_rows():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    ids = [torch.randint(0, 64, (length,)).tolist() for length in (5, 90, 17, 17, 2, 400, 600)]
    labels = [[-100] * (len(row) // 2) + row[len(row) // 2 :] for row in ids]
    losses, right, counts = [], [], [sum(label != -100 for label in wanted[1:]) for wanted in labels]
    for row, wanted in zip(ids, labels, strict=True):
        logits = model(torch.tensor([row])).logits[0, :-1]
        likeliest, labelled = logits.argmax(-1).tolist(), wanted[1:]
        right.append(sum(one == label for one, label in zip(likeliest, labelled, strict=True) if label != -100))
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(wanted[1:])).item())
    found = losses_of(model, ids, labels, "cpu")
    assert [row["loss"] for row in found] == pytest.approx(losses, rel=1e-5) and [row["tokens"] for row in found] == counts
    assert [row["right"] for row in found] == right
