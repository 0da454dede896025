"""Rows are scored in batches: each once, with its own loss, saved as computed; and what is forgotten of general questions."""

import json
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from finetune.bundled import PROBE
from finetune.evaluate.answerer import batches, run_halving
from finetune.evaluate.results import Difference, Forgetting, Journal, read_forgetting
from finetune.evaluate.score import answerer_loader, measure_forgetting
from finetune.evaluate.score import losses as losses_of
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


def test_the_losses_of_a_batch_are_those_of_its_rows_and_one_that_does_not_fit_is_halved():
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
    finished = []

    def work(rows):
        if len(rows) > 3:
            raise torch.OutOfMemoryError("full")
        finished.append(rows)

    run_halving(list(range(10)), work)
    assert [row for rows in finished for row in rows] == list(range(10)) and max(map(len, finished)) <= 3
    with pytest.raises(torch.OutOfMemoryError):
        run_halving([1, 2], lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("full")))


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


def test_other_inputs_have_another_journal_damage_is_ignored_and_a_failed_write_is_reported(tmp_path):
    Journal(tmp_path, "base", 1).add({"a": {"answer": "x"}})
    assert Journal(tmp_path, "base", 2).entries == {} == Journal(tmp_path, "tuned", 1).entries
    [file] = tmp_path.iterdir()
    file.write_bytes(b"\x00\xff\n[]\n7\n{}\n" + file.read_bytes())
    assert Journal(tmp_path, "base", 1).entries == {"a": {"answer": "x"}}
    (tmp_path / "file").touch()
    journal = Journal(tmp_path / "file", "base", 1)
    journal.add({"a": {"answer": "x"}})
    assert journal.entries == {"a": {"answer": "x"}} and "not kept" in journal.problem


def test_the_general_questions_are_short_and_different():
    rows = [json.loads(line) for line in PROBE.read_text().splitlines()]
    assert len(rows) == 60 == len({row["prompt"] for row in rows})
    assert all(row["completion"].strip() and len(row["prompt"]) + len(row["completion"]) < 160 for row in rows)


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.5, 0.2, 0.8, None), "lost in part"),
        ((-0.5, -0.8, -0.2, None), "nothing lost"),
        ((0.1, -0.2, 0.4, 9), "too few rows"),
    ],
)
def test_a_significant_rise_of_the_loss_is_distinguished_from_an_uncertain_one(interval, verdict):
    forgetting = Forgetting(60, 2.0, 2.5, Difference(*interval))
    assert verdict in forgetting.summary() and "loss 2.0000 before, 2.5000 now" in forgetting.summary()


@pytest.mark.slow
def test_losses_before_and_now_are_measured_and_stored(home, kept_run):
    run, started = RunDirectory(kept_run(home)), time.process_time()
    general = measure_forgetting(run, answerer_loader(run))
    assert time.process_time() - started < 10
    assert general.rows == 60 and general.before != general.now and read_forgetting(run) == general
