"""Rows are scored in batches that fit beside the model: each row once, in its order, with the loss that it has alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.evaluate.answerer import Answerer
from finetune.evaluate.kv_cache import ChatMemory, batch_token_limit, cache_token_bytes, chat_memory, run_halving, token_bytes
from finetune.evaluate.score import batches
from finetune.evaluate.score import losses as losses_of
from finetune.planner.plan import read_plan
from finetune.run.directory import RunDirectory


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


def test_the_bytes_of_a_token_are_those_of_keys_and_values():
    assert token_bytes(small_llama(num_key_value_heads=2), "cpu") == 3 * 2 * 2 * 8 * 4  # keys and values, float32


def test_less_free_memory_makes_smaller_batches_and_never_none(monkeypatch):
    model = small_llama()
    bytes_per_token = token_bytes(model, "cpu")
    batch_tokens = []
    for free in (0, bytes_per_token * 100, bytes_per_token * 1000, 2**60):
        monkeypatch.setattr("finetune.evaluate.kv_cache._free_bytes", lambda *_, free=free: free)
        batch_tokens.append(batch_token_limit(model, "cpu"))
    assert batch_tokens[0] == 1 and batch_tokens[1] < 100 and 600 < batch_tokens[2] < 1000 and batch_tokens[3] == 8192


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


def test_memory_that_does_not_fit_or_is_unknown_is_reported():
    assert ChatMemory(2**30, 2**20, 300, 2**31).summary() == "model 1.00 GiB, KV cache of 300 tokens 1 MiB; 2.00 GiB free"
    assert ChatMemory(2**31, 2**20, 300, 2**31).summary().endswith("it may not fit")
    assert "KV cache of 300 tokens unknown" in ChatMemory(None, None, 300, 2**31).summary()


@pytest.mark.slow
def test_the_bytes_of_the_cache_are_those_of_the_loaded_model(home, kept_run):
    run = RunDirectory(kept_run(home / "runs"))
    plan = read_plan(run.plan)
    bytes_per_token = cache_token_bytes(plan.settings)
    assert bytes_per_token == token_bytes(Answerer(run).model, "cpu")
    memory = chat_memory(plan, 100)
    assert memory.cache_bytes == bytes_per_token * (plan.settings.max_length + 100) and memory.fits
