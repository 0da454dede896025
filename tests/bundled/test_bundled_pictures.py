"""The bundled pictures and their model: what the script makes, and what the model can't do before it is trained."""

import json
import random

import numpy as np
import pytest
from PIL import Image

from finetune.bundled import dataset_paths, model_path
from finetune.recipe import recipe_from
from finetune.settings import resolve_plain
from make_vision import QUESTIONS, data_labels, draw_label, pixels, sorting, write_data

FOLDER = dataset_paths("parcels")["train"].parent


def test_the_script_makes_the_committed_rows_and_pixels(tmp_path) -> None:
    write_data(tmp_path)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
    for number, label in enumerate(data_labels()):
        with Image.open(FOLDER / f"pictures/{number:03d}.png") as picture:
            assert np.array_equal(np.asarray(picture), pixels(label))


def test_three_hundred_pictures_take_less_than_two_megabytes_and_none_is_there_twice() -> None:
    files = sorted((FOLDER / "pictures").iterdir())
    assert len({path.read_bytes() for path in files}) == len(files) == 300
    assert sum(path.stat().st_size for path in files) < 2_000_000


def test_pretraining_never_sees_how_parcels_are_sorted() -> None:
    rng = random.Random(0)
    for label in (draw_label(rng) for _ in range(100)):
        keys = json.loads(sorting(label))
        assert not any(f'"{key}"' in answer(label) for answer in QUESTIONS.values() for key in keys)


def test_the_model_is_saved_with_a_processor_of_pictures() -> None:
    names = {path.name for path in model_path("tiny-vision").iterdir()}
    assert {"config.json", "model.safetensors", "preprocessor_config.json", "tokenizer.json"} <= names


@pytest.mark.slow
def test_in_4_bit_each_layer_of_the_model_answers_on_a_cpu() -> None:
    """Also those whose shapes bitsandbytes can't repack for a CPU with AVX512-BF16."""
    import torch
    from bitsandbytes.nn import Linear4bit

    from finetune.evaluate.answerer import load_model

    recipe = recipe_from({"model_name_or_path": "tiny-vision", "dataset": "parcels", "vision": True, "load_in_4bit": True})
    layers = [module for module in load_model(resolve_plain(recipe), None, "cpu").modules() if isinstance(module, Linear4bit)]
    with torch.no_grad():
        shapes = [layer(torch.ones(2, layer.in_features)).shape for layer in layers]
    assert shapes == [(2, layer.out_features) for layer in layers] and any(layer.in_features % 64 for layer in layers)
