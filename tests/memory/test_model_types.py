"""Every model type of transformers is forecast, or refused with a reason; the committed table says which."""

from collections import Counter

import pytest

from model_types import ERROR, FORECAST, REFUSED, model_types, outcome_of, table

ROWS = table()
#: Kinds of layers and of models: experts, state spaces with attention, shared keys, a language model among other parts.
FEW = ("deepseek_v3", "gemma4", "bamba", "llama4", "qwen3_5", "bert")


def test_no_type_of_the_installed_transformers_is_missing_from_the_table():
    assert set(model_types()) - set(ROWS) == set()


def test_no_type_ends_in_an_internal_error():
    assert Counter(result for result, _ in ROWS.values())[ERROR] == 0
    assert all(detail for result, detail in ROWS.values() if result == REFUSED)
    assert all("dry run" in detail for result, detail in ROWS.values() if result == FORECAST)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in model_types()]
)
def test_a_type_is_forecast_or_refused_as_the_table_says(kind):
    outcome = outcome_of(kind)
    assert outcome.result == ROWS[kind][0], outcome.detail
