"""The speed model's count of a vision tower's work against a real one's, and what pictures cost in a step."""

import math

import pytest
import torch
from picture_models import kinds, save_picture_model
from torch.utils.flop_counter import FlopCounterMode

from finetune.card import find_card
from finetune.memory.picture_prompt import picture_inputs
from finetune.model.adapters import attach_adapters
from finetune.model.build import build_base
from finetune.model.configuration import read_config
from finetune.model.transformers_config import load_config
from finetune.planner.planning import plan_recipe, rows_with_pictures
from finetune.planner.shape import vision_work
from finetune.recipe import recipe_from
from finetune.settings import plainest

PICTURES, RANK = ((150, 110),), 4
USUAL = {("qwen2_5_vl", "none"), ("qwen3_vl", "all"), ("gemma3", "all"), ("idefics3", "projector")}
CASES = [
    pytest.param(kind, part, marks=[] if (kind, part) in USUAL else pytest.mark.exhaustive)
    for kind in sorted(kinds())
    for part in ("none", "projector", "all")
]
pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize(("kind", "part"), CASES)
def test_the_work_is_that_of_the_real_passes(tmp_path, kind, part):
    recipe = recipe_from({
        "model_name_or_path": save_picture_model(kind, tmp_path / kind), "dataset": "unread", "vision": True, "gpu": "cpu",
        "train_vision": part, "dtype": "float32", "load_in_4bit": False, "lora_r": RANK, "lora_alpha": 8,
        "target_modules": "all-linear",
    })  # fmt: skip
    work = vision_work(read_config(recipe), recipe, PICTURES)
    assert work.flops(RANK) == pytest.approx(counted_flops(plainest(recipe)), rel=0.03)


@pytest.mark.exhaustive
def test_pictures_slow_a_step_down_and_more_so_where_the_tower_is_trained(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    values = {"model_name_or_path": "Qwen/Qwen3-VL-2B-Instruct", "dataset": "unread", "max_length": 2048, "lora_r": 16}
    card, pictures = find_card("rtx-4090"), rows_with_pictures(((1024, 1024),))
    plans = [plan_recipe(recipe_from({**values, "train_vision": part}), card, pictures) for part in ("none", "all")]
    assert [plan.forecast.tokens_per_s for plan in plans] == sorted(
        (plan.forecast.tokens_per_s for plan in plans), reverse=True
    )
