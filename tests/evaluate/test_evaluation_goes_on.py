"""What an evaluation has made is kept as it is made: read again after a kill, and on a full disk only lost for later."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.evaluate.journal import Journal
from finetune.evaluate.room import halving, token_bytes, tokens_at_once


def test_a_journal_cut_off_anywhere_gives_its_whole_lines_and_takes_more(tmp_path):
    rows = {f"row{number}": {"answer": "ä\n" * number} for number in range(5)}
    whole = Journal(tmp_path, "base", {"adapter": 1})
    for key, entry in rows.items():
        whole.add({key: entry})
    [file] = tmp_path.iterdir()
    content = file.read_bytes()
    for end in range(len(content)):
        file.write_bytes(content[:end])
        left = Journal(tmp_path, "base", {"adapter": 1})
        assert all(rows[key] == entry for key, entry in left.known.items())
        left.add({"row4": rows["row4"]})
        assert Journal(tmp_path, "base", {"adapter": 1}).known == {**left.known, "row4": rows["row4"]}


def test_other_facts_have_another_journal_and_damage_is_passed_over(tmp_path):
    Journal(tmp_path, "base", 1).add({"a": {"answer": "x"}})
    assert Journal(tmp_path, "base", 2).known == {} == Journal(tmp_path, "tuned", 1).known
    [file] = tmp_path.iterdir()
    file.write_bytes(b"\x00\xff\n[]\n7\n{}\n" + file.read_bytes())
    assert Journal(tmp_path, "base", 1).known == {"a": {"answer": "x"}}


def test_without_a_place_to_write_the_evaluation_goes_on_and_says_so(tmp_path):
    (tmp_path / "file").touch()
    journal = Journal(tmp_path / "file", "base", 1)
    journal.add({"a": {"answer": "x"}})
    assert journal.known == {"a": {"answer": "x"}} and "not kept" in journal.problem


def test_the_bytes_of_a_token_are_those_of_keys_and_values():
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).eval()
    assert token_bytes(model, "cpu") == 3 * 2 * 2 * 16 * 4  # layers, keys and values, heads, head size, float32


def test_less_free_memory_makes_smaller_batches_and_never_none(monkeypatch):
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    each = token_bytes(model, "cpu")
    at_once = []
    for free in (0, each * 100, each * 1000, 2**60):
        monkeypatch.setattr("finetune.evaluate.room._free_bytes", lambda *_, free=free: free)
        at_once.append(tokens_at_once(model, "cpu"))
    assert at_once[0] == 1 and at_once[1] < 100 and 600 < at_once[2] < 1000 and at_once[3] == 8192


def test_a_batch_that_does_not_fit_is_halved_until_it_does():
    done = []

    def work(rows):
        if len(rows) > 3:
            raise torch.OutOfMemoryError("full")
        done.append(rows)

    halving(list(range(10)), work)
    assert [row for rows in done for row in rows] == list(range(10)) and max(map(len, done)) <= 3
    with pytest.raises(torch.OutOfMemoryError):
        halving([1, 2], lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))
