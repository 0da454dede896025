"""Properties for every recipe, card and dataset: headroom, validity, effective batch, determinism."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from finetune.card import catalogue, find_card
from finetune.errors import RecipeError
from finetune.planner.plan import DataStatistics
from finetune.planner.planner import make_plan
from finetune.planner.planning import plan_recipe, without_rows
from finetune.recipe import NO_DATASET, parse_recipe, recipe_from
from finetune.settings import unresolved
from finetune.units import GIB

MODELS = ["meta-llama/Llama-3.2-1B-Instruct", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "google/gemma-2-2b-it"]
SETTINGS = {
    "load_in_4bit": st.booleans(), "lora_r": st.sampled_from([8, 16, 64, 256]),
    "max_length": st.sampled_from([256, 1024, 4096]),
    "activation_checkpointing": st.sampled_from([True, False, "selective", "offload"]),
    "activation_checkpointing_every_n_layers": st.sampled_from([1, 2, 5]),
    "optim": st.sampled_from(["adamw_torch_fused", "adamw_8bit", "adamw_cpu_offload", "adafactor"]),
    "effective_batch_size": st.integers(1, 48), "per_device_train_batch_size": st.integers(1, 6),
    "gradient_accumulation_steps": st.integers(1, 6), "excess_length": st.sampled_from(["drop", "truncate", "raise"]),
}  # fmt: skip


@st.composite
def cases(draw):
    names = draw(st.lists(st.sampled_from(sorted(SETTINGS)), max_size=4, unique=True))
    values = {"model_name_or_path": draw(st.sampled_from(MODELS)), "dataset": {"path": "d.jsonl"}}
    values |= {name: draw(SETTINGS[name]) for name in names}
    values["launch"] = {"num_processes": draw(st.sampled_from([1, 1, 2]))}
    card = find_card(draw(st.sampled_from(sorted(catalogue()))))
    free = draw(st.integers(2 * GIB, card.total_bytes))
    lengths = tuple(sorted(draw(st.lists(st.integers(8, 3000), max_size=40))))
    data = DataStatistics(len(lengths), 0, sum(lengths), sum(lengths), lengths) if lengths else None
    return values, find_card(card.name, free_bytes=free), data


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=cases())
def test_every_plan_is_a_valid_recipe_that_keeps_the_batch_and_never_overdraws(arithmetic, case):
    values, card, data = case
    try:
        recipe = recipe_from(values)
        plan = make_plan(recipe, card, data)
    except RecipeError as error:  # settings that disagree, or a batch that the processes can't share
        assert error.problems
        return
    chosen = plan.settings
    assert unresolved(chosen) == [] and type(chosen).model_validate(chosen.model_dump()) == chosen
    world = chosen.launch.num_processes
    assert chosen.per_device_train_batch_size * chosen.gradient_accumulation_steps * world == chosen.effective_batch_size
    assert all(getattr(chosen, name) == getattr(recipe, name) for name in values)
    assert plan.headroom_bytes == plan.budget_bytes - plan.forecast.peak_high_bytes
    assert plan.verdict.fits == (plan.headroom_bytes >= 0)
    assert plan.verdict != "does not fit" or plan.forecast.peak_bytes > plan.budget_bytes
    assert make_plan(recipe, card, data) == plan


FREE_GIB, LENGTHS = (6, 8, 10, 11.6, 14, 15.6, 18, 20, 22, 23.4), (512, 2048, 8192)
MODELS_OF_GRID = [
    "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-14B", "google/gemma-3-12b-it",
    "Qwen/Qwen3-32B", "Qwen/Qwen3-30B-A3B",
]  # fmt: skip


def planned(model, gib, length, overrides=()):
    text = f"{{model_name_or_path: {model}, dataset: {{path: {NO_DATASET}}}, max_length: {length}, effective_batch_size: 16}}"
    recipe = parse_recipe(text, overrides=overrides)
    return plan_recipe(recipe, find_card("rtx-4090", free_bytes=round(gib * GIB)), without_rows)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("model", "free_gib", "lengths"),
    [
        ("Qwen/Qwen3-8B", (6, 8, 20), (512, 8192)),
        *(pytest.param(model, FREE_GIB, LENGTHS, marks=pytest.mark.exhaustive) for model in MODELS_OF_GRID),
    ],
)
def test_more_memory_or_shorter_rows_fit_and_no_faster_plan_is_hidden(model, free_gib, lengths):
    plans = {(length, gib): planned(model, gib, length) for length in lengths for gib in free_gib}
    wrong = []
    for (length, gib), plan in plans.items():
        fitting = [other for other in plan.alternatives if other.verdict.fits]
        fits, fastest = plan.verdict.fits, max((other.tokens_per_s for other in fitting), default=0.0)
        for less in free_gib[: free_gib.index(gib)]:
            with_less = plans[length, less]
            if with_less.verdict.fits and not (fits and fastest >= 0.995 * with_less.forecast.tokens_per_s):
                wrong.append((length, gib, fastest, less, with_less.forecast.tokens_per_s))
        if not fits and any(plans[longer, gib].verdict.fits for longer in lengths if longer > length):
            wrong.append((length, gib, "longer rows fit"))
        if fits and gib == free_gib[-1]:
            for other in (plan.alternatives[0], max(fitting, key=lambda other: other.tokens_per_s)):
                replanned = planned(model, gib, length, other.overrides.split()).forecast
                if not (
                    replanned.tokens_per_s >= 0.995 * other.tokens_per_s
                    and (other.peak_bytes == replanned.peak_bytes or not other.chosen)
                ):
                    wrong.append((length, gib, other, replanned.peak_bytes, replanned.tokens_per_s))
    assert wrong == []


def test_the_trained_share_is_that_of_the_micro_batch_with_most_trained_tokens():
    data = DataStatistics(3, 0, 300, 90, (50, 100, 150), most_trained=(60, 20, 10), densest_trained_share=0.4)
    assert data.trained_share_of(1, 151, packed=False) == 60 / 150
    assert data.trained_share_of(2, 151, packed=False) == 80 / 300
    assert data.trained_share_of(2, 41, packed=False) == 60 / 80  # rows are cut at 41 tokens
    assert data.trained_share_of(1, 151, packed=True) == 0.4
    assert DataStatistics(3, 0, 300, 90).trained_share_of(2, 151, packed=False) == 1
