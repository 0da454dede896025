"""Plans for rows with pictures: tokens by the catalogue's processors, max_pixels where they don't fit, a tower's work."""

import copy
import functools
import json
import math
from pathlib import Path

import pytest
import torch
from picture_models import kinds, save_picture_model
from torch.utils.flop_counter import FlopCounterMode

from finetune.card import find_card
from finetune.cli.plan import _picture_sizes
from finetune.errors import CommandError, ModelError, RecipeError
from finetune.memory.picture_prompt import picture_inputs, picture_prompt
from finetune.model.adapters import attach_adapters
from finetune.model.build import build_base
from finetune.model.configuration import read_config
from finetune.model.transformers_config import load_config
from finetune.planner.plan import Verdict
from finetune.planner.planning import plan_largest, plan_recipe, rows_with_pictures
from finetune.planner.shape import vision_work
from finetune.recipe import recipe_from
from finetune.settings import resolve_plain

pytestmark = pytest.mark.usefixtures("no_hub")
PICTURES, RANK = ((150, 110),), 4
USUAL = {("qwen2_5_vl", "none"), ("qwen3_vl", "all"), ("gemma3", "all"), ("idefics3", "projector")}
CASES = [
    pytest.param(kind, part, marks=[] if (kind, part) in USUAL else pytest.mark.exhaustive)
    for kind in sorted(kinds())
    for part in ("none", "projector", "all")
]


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


def test_max_pixels_scales_the_pictures_of_a_plan():
    prompt = picture_prompt(recipe("Qwen/Qwen3-VL-8B-Instruct", max_pixels=512 * 512), ((1024, 1024),))
    assert (prompt.sizes, prompt.token_counts) == (((512, 512),), (256,))


def test_a_model_whose_processor_nobody_here_knows_is_refused_with_those_that_are_known():
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


class _Reached(Exception):
    pass


def attention(query, key, value, *_, **__):
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def counted_flops(settings):
    """FLOPs of the real passes of a vision part with values, up to the language model and back."""
    model = attach_adapters(build_base(settings, load_config(settings), device="cpu", weights=True), settings)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    base, reached = model.get_base_model(), {}

    def stop(_, arguments, named):
        reached.update(named)
        raise _Reached

    base.get_submodule(base.decoder_path).register_forward_pre_hook(stop, with_kwargs=True)
    inputs = picture_inputs(settings, 1, 1, PICTURES)
    inputs.pop("labels")
    formulas = {kernel: attention, backward: lambda _, *shapes, **__: 2.5 * attention(*shapes)}
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        with pytest.raises(_Reached):
            model(**inputs)
        leaves = torch.utils._pytree.tree_leaves(reached)
        trained = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if trained:
            sum(leaf.float().sum() for leaf in trained).backward()
    return counter.get_total_flops()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "part"), CASES)
def test_the_work_is_that_of_the_real_passes(tmp_path, kind, part):
    recipe = recipe_from({
        "model_name_or_path": save_picture_model(kind, tmp_path / kind), "dataset": "unread", "vision": True, "gpu": "cpu",
        "train_vision": part, "dtype": "float32", "load_in_4bit": False, "lora_r": RANK, "lora_alpha": 8,
        "target_modules": "all-linear",
    })  # fmt: skip
    work = vision_work(read_config(recipe), recipe, PICTURES)
    assert work.flops(RANK) == pytest.approx(counted_flops(resolve_plain(recipe)), rel=0.03)


@pytest.mark.exhaustive
def test_pictures_slow_a_step_down_and_more_so_where_the_tower_is_trained():
    values = {"model_name_or_path": "Qwen/Qwen3-VL-2B-Instruct", "dataset": "unread", "max_length": 2048, "lora_r": 16}
    card, pictures = find_card("rtx-4090"), rows_with_pictures(((1024, 1024),))
    plans = [plan_recipe(recipe_from({**values, "train_vision": part}), card, pictures) for part in ("none", "all")]
    assert [plan.forecast.tokens_per_s for plan in plans] == sorted(
        (plan.forecast.tokens_per_s for plan in plans), reverse=True
    )
