"""The bytes of a chat's model and KV cache are known before the model is loaded."""

import pytest

from finetune.evaluate.answerer import Answerer
from finetune.evaluate.kv_cache import ChatMemory, cache_token_bytes, chat_memory, token_bytes
from finetune.planner.plan import read_plan
from finetune.run.directory import RunDirectory


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
