"""Types with pictures: what becomes of pictures; their text and number of values by the processor's own rule."""

import random
from importlib.util import find_spec

import pytest
from picture_models import kinds, save_picture_model

import finetune.compat.processors as processors
from finetune.data.pictures.processing import PictureProcessor, blank
from finetune.data.tokenizer import ProcessorLoader, load_tokenizer
from finetune.recipe import recipe_from
from picture_types import COMPARED, NOT_COMPARED, outcome_of, picture_types, table

USUAL = ("qwen3_vl", "gemma3", "idefics3")
CASES = [pytest.param(kind, marks=[] if kind in USUAL else pytest.mark.exhaustive) for kind in sorted(kinds())]
RANDOM = random.Random(0)
SIZES = [(RANDOM.randint(8, 260), RANDOM.randint(8, 260)) for _ in range(60)]


def processor_of(kind, folder):
    recipe = recipe_from({"model_name_or_path": save_picture_model(kind, folder / kind), "dataset": "unread"})
    return ProcessorLoader(recipe)(load_tokenizer(recipe))


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_text_and_values_of_every_size_are_those_of_a_processed_picture(tmp_path, kind):
    quick = processor_of(kind, tmp_path)
    for size in SIZES:
        alone = PictureProcessor(quick.processor, None)
        assert quick.text_of(*size) == processors.picture_texts(quick.processor, [blank(*size)])[0]
        assert quick.value_count(*size) == alone._processed_values(*size)


@pytest.mark.slow
def test_ten_thousand_sizes_are_counted_with_a_few_processed_pictures(tmp_path, monkeypatch):
    processed, process = [], processors._process
    monkeypatch.setattr(processors, "_process", lambda *rows: processed.append(rows) or process(*rows))
    quick = processor_of("qwen3_vl", tmp_path)
    for number in range(10_000):
        quick.text_of(30 + number % 100, 30 + number // 100)
        quick.value_count(30 + number % 100, 30 + number // 100)
    assert len(processed) == 1


def test_a_type_is_compared_or_has_a_reason_as_the_table_says():
    if find_spec("torchvision") or find_spec("num2words"):
        pytest.skip("these packages give more types a processor")
    rows = table()
    outcomes = {kind: outcome_of(kind) for kind in picture_types()}
    assert outcomes == {kind: rows[kind] for kind in outcomes}
    assert all(bool(reason) == (result not in (COMPARED, NOT_COMPARED)) for result, reason in rows.values())
