"""Answers and losses are saved as they are computed: reused after a kill, and on a full disk only missing later."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.evaluate.journal import Journal
from finetune.evaluate.kv_cache import batch_token_limit, run_halving, token_bytes


def test_a_journal_cut_off_anywhere_keeps_its_complete_lines_and_can_be_appended(tmp_path):
    rows = {f"row{number}": {"answer": "ä\n" * number} for number in range(5)}
    complete = Journal(tmp_path, "base", {"adapter": 1})
    for key, entry in rows.items():
        complete.add({key: entry})
    [file] = tmp_path.iterdir()
    content = file.read_bytes()
    for end in range(len(content)):
        file.write_bytes(content[:end])
        truncated = Journal(tmp_path, "base", {"adapter": 1})
        assert all(rows[key] == entry for key, entry in truncated.entries.items())
        truncated.add({"row4": rows["row4"]})
        assert Journal(tmp_path, "base", {"adapter": 1}).entries == {**truncated.entries, "row4": rows["row4"]}


def test_other_inputs_have_another_journal_and_damage_is_ignored(tmp_path):
    Journal(tmp_path, "base", 1).add({"a": {"answer": "x"}})
    assert Journal(tmp_path, "base", 2).entries == {} == Journal(tmp_path, "tuned", 1).entries
    [file] = tmp_path.iterdir()
    file.write_bytes(b"\x00\xff\n[]\n7\n{}\n" + file.read_bytes())
    assert Journal(tmp_path, "base", 1).entries == {"a": {"answer": "x"}}


def test_an_evaluation_that_can_not_write_continues_and_says_so(tmp_path):
    (tmp_path / "file").touch()
    journal = Journal(tmp_path / "file", "base", 1)
    journal.add({"a": {"answer": "x"}})
    assert journal.entries == {"a": {"answer": "x"}} and "not kept" in journal.problem


def test_the_bytes_of_a_token_are_those_of_keys_and_values():
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).eval()
    assert token_bytes(model, "cpu") == 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, float32


def test_less_free_memory_makes_smaller_batches_and_never_none(monkeypatch):
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
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
