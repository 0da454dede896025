"""Held-out prompts are answered at each evaluation, and change nothing else."""

import pytest
from conftest import adapter_hash, events_of

pytestmark = pytest.mark.slow


def test_each_evaluation_answers_the_same_prompts_and_the_adapter_is_the_same_without(make_run, train):
    settings = ["eval_steps=4", "lora_dropout=0.1"]
    run, without = make_run(*settings), make_run(*settings, "sample_answers=0")
    assert train(run) == train(without) == 0, run.log.read_text()[-2000:]
    samples = events_of(run, "sample")
    assert [event.step for event in samples] == [4, 4, 4, 8, 8, 8]
    assert [event.prompt for event in samples[:3]] == [event.prompt for event in samples[3:]]
    assert all(event.expected and isinstance(event.answer, str) for event in samples)
    assert not events_of(without, "sample")
    assert adapter_hash(run) == adapter_hash(without)


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
