"""Rank, scale and learning rate follow their sources."""

import dataclasses

import pytest
from arithmetic_forecast import LLAMA_8B as SHAPE

from finetune.planner.defaults import advise_alpha, advise_learning_rate, advise_rank
from finetune.planner.plan import DataStatistics
from finetune.recipe import parse_recipe


@pytest.mark.parametrize(
    ("family", "hidden", "rate"), [("llama", 4096, 2.9e-4), ("qwen3", 4096, 4.7e-4), ("llama", 2048, 4.9e-4)]
)
def test_llama_and_qwen_use_the_fitted_formula(family, hidden, rate):
    advised, reason = advise_learning_rate(dataclasses.replace(SHAPE, family=family, hidden=hidden))
    assert advised == pytest.approx(rate) and "LoRA Without Regret" in reason


@pytest.mark.parametrize(("billions", "rate"), [(7, 2e-4), (13, 2e-4), (33, 1e-4), (65, 1e-4)])
def test_other_families_use_qloras_table(billions, rate):
    advised, reason = advise_learning_rate(dataclasses.replace(SHAPE, family="falcon", parameters=billions * 10**9))
    assert advised == rate and "QLoRA" in reason


@pytest.mark.parametrize(
    ("trained_tokens", "rank"), [(10_000, 16), (80_000_000, 16), (90_000_000, 32), (1_000_000_000, 256), (10**11, 256)]
)
def test_rank_grows_with_the_trained_tokens(trained_tokens, rank):
    """Rank 16 of an 8B model: 41.9M parameters at 2 bits hold 83.9M tokens at 1 bit."""
    advised, reason = advise_rank(SHAPE, DataStatistics(1000, 0, trained_tokens, trained_tokens))
    assert advised == rank and "LoRA Without Regret" in reason


def test_rank_stabilised_scaling_has_the_same_scale_at_rank_16():
    recipe = parse_recipe("model_name_or_path: m\ndataset: d.jsonl\n")
    plain, stabilised = advise_alpha(recipe, 16)[0], advise_alpha(recipe.model_copy(update={"use_rslora": True}), 16)[0]
    assert plain / 16 == stabilised / 16**0.5
