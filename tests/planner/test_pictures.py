"""Plans for rows with pictures: tokens by the catalogue's processors, max_pixels where they don't fit."""

import copy
import functools
import json
from pathlib import Path

import pytest
from picture_models import save_picture_model

from finetune.card import find_card
from finetune.cli.plan import _picture_sizes
from finetune.errors import CommandError, ModelError, RecipeError
from finetune.memory.picture_prompt import picture_prompt
from finetune.model.configuration import read_config
from finetune.model.transformers_config import load_config
from finetune.planner.plan import Verdict
from finetune.planner.planning import plan_largest, plan_recipe, rows_with_pictures
from finetune.recipe import recipe_from
from finetune.settings import resolve_plain

pytestmark = pytest.mark.usefixtures("no_hub")


@pytest.fixture
def no_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def recipe(model, **more):
    return recipe_from({"model_name_or_path": model, "dataset": "unread", **more})


@pytest.mark.parametrize(
    ("model", "size", "tokens"),
    [
        ("Qwen/Qwen3-VL-8B-Instruct", (1024, 1024), 32 * 32), ("Qwen/Qwen3-VL-30B-A3B-Instruct", (640, 480), 20 * 15),
        ("Qwen/Qwen2.5-VL-7B-Instruct", (1024, 1024), 37 * 37), ("google/gemma-3-4b-it", (1024, 1024), 256),
    ],
)  # fmt: skip
def test_a_picture_takes_the_tokens_of_the_models_own_rule_and_has_its_ids(model, size, tokens):
    prompt = picture_prompt(recipe(model), (size, size))
    config = load_config(resolve_plain(recipe(model)))
    image = getattr(config, "image_token_id", None) or config.image_token_index
    around = len(prompt.processor.processor.tokenizer(prompt.processor.text_of(*size))["input_ids"]) - tokens
    assert prompt.ids.count(image) == 2 * tokens
    assert prompt.token_counts == (tokens + around,) * 2 and around <= 6


def test_max_pixels_scales_the_pictures_of_a_plan_and_an_unknown_processor_is_refused_with_the_known_ones():
    prompt = picture_prompt(recipe("Qwen/Qwen3-VL-8B-Instruct", max_pixels=512 * 512), ((1024, 1024),))
    assert (prompt.sizes, prompt.token_counts) == (((512, 512),), (256,))
    with pytest.raises(ModelError, match="tokens per image are unknown") as refused:
        picture_prompt(recipe("google/gemma-4-E4B-it"), ((1024, 1024),))
    assert "qwen3_vl" in refused.value.fix


def test_the_catalogue_is_asked_only_while_the_tokenizer_is_not_here(tmp_path, monkeypatch):
    folder = Path(save_picture_model("qwen2_5_vl", tmp_path / "vl"))
    with pytest.raises(RecipeError, match="chat_template: gone.jinja can't be read"):
        picture_prompt(recipe(str(folder), chat_template="gone.jinja"), ((56, 56),))
    away = [path.rename(tmp_path / path.name) for path in folder.glob("tokenizer*")]
    by_catalogue = picture_prompt(recipe(str(folder)), ((56, 56),))
    for path in away:
        path.rename(folder / path.name)
    monkeypatch.setattr("time.monotonic", lambda: 1e9)
    own = picture_prompt(recipe(str(folder)), ((56, 56),))
    assert len(own.ids) > len(by_catalogue.ids)  # with the chat template


@pytest.mark.parametrize(
    ("text", "reason"),
    [("1024", "not an image's width"), ("9x0", "shorter side"), ("9999x9999", "megapixels"), ("8x8x65", "not an image's")],
)
def test_pictures_that_no_run_takes_are_refused(text, reason):
    with pytest.raises(CommandError, match=reason):
        _picture_sizes(text)


def test_the_largest_length_is_planned_with_the_pictures_and_no_model_of_text_is_searched_for_them(tmp_path):
    small = recipe_from({"model_name_or_path": save_picture_model("qwen2_5_vl", tmp_path / "vl"), "dataset": "none"})
    rows, card = rows_with_pictures(((112, 112),) * 2), find_card("rtx-4060")
    plan = plan_largest(small, card, rows, "max_length").plan
    assert plan.settings.vision and plan.settings.max_length == 2048 and plan.data.pictures == ((112, 112),) * 2
    with pytest.raises(RecipeError, match="the rows have images"):
        plan_largest(small, card, rows, "model")


@pytest.fixture
def shallow(tmp_path):
    """Qwen3-VL-2B with four layers, and three in the tower: by name its plans take minutes."""
    values = copy.deepcopy(read_config(recipe("Qwen/Qwen3-VL-2B-Instruct")))
    values["text_config"]["num_hidden_layers"] = 4
    values["vision_config"] |= {"depth": 3, "deepstack_visual_indexes": [1]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return functools.partial(recipe, str(tmp_path), effective_batch_size=1, load_in_4bit=True)


@pytest.mark.slow
def test_the_planner_scales_pictures_down_just_where_they_do_not_fit_and_says_what_that_costs(shallow):
    rows, card = rows_with_pictures(((1024, 1024),) * 3), find_card("rtx-4060")
    more = {"activation_checkpointing": True, "lora_r": 8}
    small, large = (plan_recipe(shallow(memory_budget=budget, **more), card, rows) for budget in ("2GiB", "7GiB"))
    assert small.verdict == large.verdict == Verdict.FITS
    assert large.settings.max_pixels is None and large.data.picture_tokens == (32 * 32,) * 3
    assert small.settings.max_pixels < 1024 * 1024 and "1,024 tokens per image -> " in small.reasons["max_pixels"]
    assert small.forecast.peak_high_bytes <= small.budget_bytes
    assert any(f"{small.data.picture_tokens[0]:,} tokens" in note for note in small.forecast.notes)


@pytest.mark.exhaustive
def test_a_plan_with_pictures_that_does_not_fit_proposes_only_what_works_with_pictures(shallow):
    rows = rows_with_pictures(((1024, 1024),))
    plan = plan_recipe(shallow(memory_budget="1GiB", lora_r=16, max_length=2048), find_card("rtx-4060"), rows)
    assert plan.verdict == Verdict.NO_FIT
    overrides = " ".join(row.override for row in plan.suggestions)
    assert "lora_r=8" in overrides and "layer_offloading" not in overrides and "max_length=" not in overrides
