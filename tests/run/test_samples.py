"""Held-out prompts are answered at each evaluation, an arm of a sweep keeps each row's loss, and chat answers as `eval`."""

import json

import pytest
from conftest import adapter_hash, events_of

from finetune.evaluate.answerer import Answerer
from finetune.evaluate.score import compare
from finetune.run.best import read_row_losses

pytestmark = pytest.mark.slow


def test_each_evaluation_has_the_same_prompts_and_rows_and_the_adapter_is_the_same_without(make_run, train):
    settings = ["eval_steps=4", "lora_dropout=0.1", "per_device_eval_batch_size=1"]
    run, without = make_run(*settings), make_run(*settings, "sample_answers=0")
    run.arm.touch()
    assert train(run) == train(without) == 0, run.log.read_text()[-2000:]
    samples = events_of(run, "sample")
    assert [event.step for event in samples] == [0, 0, 0, 4, 4, 4, 8, 8, 8]
    assert [event.prompt for event in samples[:6]] == [event.prompt for event in samples[3:]]
    assert all(event.expected and isinstance(event.answer, str) for event in samples)
    assert not events_of(without, "sample")
    assert adapter_hash(run) == adapter_hash(without)
    rows, evaluations = read_row_losses(run), events_of(run, "eval")
    assert [losses.step for losses in rows] == [event.step for event in evaluations] == [4, 8]
    assert len(rows[0].losses) == 8 and min(rows[0].tokens) > 0
    assert rows[0].mean == pytest.approx(evaluations[0].eval_loss)
    assert sum(rows[0].losses) / 8 == pytest.approx(rows[0].mean, abs=1e-5)


def test_too_little_memory_for_answers_ends_them_and_not_the_run(make_run, train):
    run = make_run("eval_steps=4")

    def fault():
        import torch

        from finetune.run import training

        def out_of_memory(*_, **__):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        training.greedy_answers = out_of_memory

    assert train(run, fault) == 0, run.log.read_text()[-2000:]
    assert len([event for event in events_of(run, "warning") if "sample answers" in event.message]) == 1
    assert not events_of(run, "sample") and len(events_of(run, "eval")) == 2


def test_after_twenty_steps_on_question_and_answer_columns_chat_says_what_eval_scored(make_run, train, tmp_path):
    towns = [f"{first}{last}" for first in ("Lyo", "Os", "Tur", "Cai", "Qui", "Kyo") for last in ("n", "lo", "in", "ro")]
    rows = [{"question": f"Which town is {town}?", "answer": f"It is {town}."} for town in towns]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = make_run(
        f"dataset.path={tmp_path / 'rows.jsonl'}", "dataset.test_split_size=4", "dataset.max_rows=null", "max_steps=20",
        "save_steps=0", "eval_steps=20",
    )  # fmt: skip
    train.whole(run)
    scored, chat = compare(run), Answerer(run)
    examples = json.loads((run.data / "eval_examples.json").read_text())
    assert len(examples) == 4 and not chat.plain and any(scored.tuned.answers)
    before = [event.answer for event in events_of(run, "sample") if event.step == 0]
    assert before == scored.base.answers[:3] != scored.tuned.answers[:3]
    for row, answer in zip(examples, scored.tuned.answers, strict=True):
        asked = chat.prompt_ids([{"role": "user", "content": row["prompt"]}])
        assert asked == row["prompt_ids"]
        [(reply, _)] = chat.answer([asked], max_new_tokens=128, with_special_tokens=False)
        assert reply.startswith(answer)
