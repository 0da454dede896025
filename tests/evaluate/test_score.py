"""Rows are scored in batches that fit beside the model: each row once, in its order, with the loss that it has alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.evaluate.answerer import batches, run_halving
from finetune.evaluate.score import losses as losses_of


def small_llama(**sizes):
    torch.manual_seed(0)
    sizes |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


@settings(deadline=None)
@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 200))
def test_every_row_is_in_one_batch_that_is_not_too_large(lengths, max_tokens):
    row_batches = batches(lengths, max_tokens)
    assert sorted(index for batch in row_batches for index in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * max(lengths[index] for index in batch) <= max_tokens for batch in row_batches)


def test_the_losses_of_a_batch_are_those_of_its_rows():
    model = small_llama()
    ids = [torch.randint(0, 64, (length,)).tolist() for length in (5, 90, 17, 17, 2, 400, 600)]
    rows = [(row, [-100] * (len(row) // 2) + row[len(row) // 2 :]) for row in ids]
    losses, right, counts = [], [], [sum(label != -100 for label in row_labels[1:]) for _, row_labels in rows]
    for row, row_labels in rows:
        logits = model(torch.tensor([row])).logits[0, :-1]
        likeliest, targets = logits.argmax(-1).tolist(), row_labels[1:]
        right.append(sum(token == label for token, label in zip(likeliest, targets, strict=True) if label != -100))
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(row_labels[1:])).item())
    results = losses_of(model, rows, "cpu")
    assert [row["loss"] for row in results] == pytest.approx(losses, rel=1e-5) and [row["tokens"] for row in results] == counts
    assert [row["right"] for row in results] == right


def test_a_batch_that_does_not_fit_is_halved_until_it_does():
    finished = []

    def work(rows):
        if len(rows) > 3:
            raise torch.OutOfMemoryError("full")
        finished.append(rows)

    run_halving(list(range(10)), work)
    assert [row for rows in finished for row in rows] == list(range(10)) and max(map(len, finished)) <= 3
    with pytest.raises(torch.OutOfMemoryError):
        run_halving([1, 2], lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
