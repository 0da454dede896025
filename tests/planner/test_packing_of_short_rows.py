"""Packing is on where torch's varlen kernel runs and rows are short, and keeps about the default rows per step."""

import pytest

from finetune.card import find_card
from finetune.errors import RecipeError
from finetune.model.hybrid import PACKAGES
from finetune.planner.defaults import DROPS_BOUNDARIES, KEPT_APART, choose_packing
from finetune.planner.plan import Choices, DataStatistics
from finetune.planner.planner import make_plan
from finetune.recipe import parse_recipe
from finetune.units import GIB

SHORT = DataStatistics(1000, 0, 128_000, 64_000, (128,) * 1000)


def planned(new_forecaster, model="Qwen/Qwen3-8B", gpu="rtx-4090", data=SHORT, overrides=()):
    recipe = parse_recipe(f"model_name_or_path: {model}\ndataset: d\n", overrides=overrides)
    return make_plan(recipe, find_card(gpu), data, forecaster=new_forecaster())


def test_short_rows_are_packed_and_a_step_still_has_about_16_of_them(new_forecaster):
    settings = planned(new_forecaster).settings
    assert settings.packing is True and settings.attn_implementation == "torch_varlen"
    assert (settings.max_length, settings.effective_batch_size) == (2048, 1)
    longer = planned(new_forecaster, data=DataStatistics(1000, 0, 512_000, 64_000, (512,) * 1000))
    assert longer.settings.effective_batch_size == 4 and "about 16 rows per step" in longer.reasons["effective_batch_size"]


def test_packed_sequences_decide_the_number_of_steps(new_forecaster):
    plan = planned(new_forecaster, overrides=["num_train_epochs=1"])
    assert plan.total_steps == -(-128_000 // 2048)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "because"),
    [
        ({"gpu": "t4"}, "capability 8.0"),
        ({"model": "google/gemma-2-2b-it"}, "can't be used"),
        ({"model": "tiiuae/falcon-7b"}, "rows of falcon models"),
        ({"model": "openai/gpt-oss-20b"}, "rows of gpt_oss models"),
        ({"model": "Qwen/Qwen3-0.6B", "overrides": ["effective_batch_size=16"]}, "change the rows per step"),
        ({"overrides": ["attn_implementation=eager"]}, "dense mask"),
        ({"data": None}, "not been read"),
        ({"data": DataStatistics(100, 0, 200_000, 200_000, (2000,) * 100)}, "rows are long"),
    ],
)  # fmt: skip
def test_packing_is_off_where_it_would_not_pay_or_not_be_right(new_forecaster, change, because):
    plan = planned(new_forecaster, **change)
    assert plan.settings.packing is False and because in plan.reasons["packing"]
    assert plan.settings.attn_implementation != "torch_varlen"


def test_rows_are_not_packed_where_packed_sequences_do_not_fit(new_forecaster):
    recipe = parse_recipe("model_name_or_path: Qwen/Qwen3-8B\ndataset: d\n")
    plan = make_plan(recipe, find_card("rtx-4090", free_bytes=round(7.6 * GIB)), SHORT, forecaster=new_forecaster())
    assert plan.verdict == "fits" and plan.settings.packing is False and "do not fit" in plan.reasons["packing"]


def test_a_hybrids_rows_are_not_packed_and_a_recipe_that_packs_them_ends_before_the_run(new_forecaster):
    assert not KEPT_APART & {*PACKAGES, "lfm2", "lfm2_moe", "lfm3", "inkling2", "recurrent_gemma", "minimax", "rwkv", "xlstm"}
    assert "10 layers" in planned(new_forecaster, model="LiquidAI/LFM2-350M").reasons["packing"]
    with pytest.raises(RecipeError, match="10 layers of this lfm2 model pass a state"):
        planned(new_forecaster, model="LiquidAI/LFM2-350M", overrides=["packing=true"])
    recipe = parse_recipe("model_name_or_path: some/model\ndataset: d\npacking: true\n")
    for kind in DROPS_BOUNDARIES:
        with pytest.raises(RecipeError, match=f"code of {kind} models drops the boundaries") as caught:
            choose_packing(Choices(recipe), find_card("rtx-4090"), {"model_type": kind}, SHORT, False, 21)
        assert caught.value.fix == "Set packing=false."


def test_packing_can_be_asked_for_anywhere(new_forecaster):
    plan = planned(new_forecaster, model="HuggingFaceTB/SmolLM2-135M-Instruct", gpu="cpu", overrides=["packing=true"])
    assert plan.settings.packing is True and plan.settings.attn_implementation == "torch_varlen"
