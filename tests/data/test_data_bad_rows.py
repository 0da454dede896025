"""Every row that can't be trained on is named with file, row, field and reason; none is dropped silently."""

import pytest
from small_data import build_tokenizer, prepare, read_examples, recipe, talk

from finetune.data import template
from finetune.errors import DataError, RecipeError

GOOD = talk("Hi", "Hello")


def refused(path, **settings):
    return [(row.row, row.field, row.reason) for row in read_examples(recipe(path, **settings).dataset).train.refused]


def test_a_row_of_five_million_characters_is_refused_at_once(write):
    path = write("rows.jsonl", [{"text": "ok"}, {"text": "a" * 5_000_000}])
    assert refused(path) == [(2, "text", "has 5,000,000 characters; the limit of one row is 4,194,304")]


@pytest.mark.parametrize("levels", [101, 600, 100_000])
def test_a_row_that_is_nested_deeply_is_refused_and_a_file_that_is_not_read(write, levels):
    nested = "[" * levels + "]" * levels
    assert refused(write("rows.jsonl", '{"text": "ok"}\n{"text": ' + nested + "}")) == [(2, None, "is nested too deeply")]
    with pytest.raises(DataError, match="rows.json: is nested too deeply"):
        refused(write("rows.json", nested))


def test_a_template_that_never_ends_is_ended(write, monkeypatch):
    monkeypatch.setattr(template, "RENDER_S", 0.5)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(RecipeError, match="the chat template takes more than"):
        prepare(recipe(write("rows.jsonl", [GOOD])), build_tokenizer(endless), max_length=None)
