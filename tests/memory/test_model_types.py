"""Every model type of transformers is forecast, or refused with a reason; the committed table says which, and which train."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import model_types
from model_types import FORECAST, REFUSED, YES, check, outcome_of

ROWS = model_types.table()
KINDS = model_types.model_types()
FEW = ("deepseek_v3", "gemma4", "bamba", "llama4", "qwen3_5", "bert")  # of different layers and parts


def test_no_type_of_the_installed_transformers_is_missing_from_the_table():
    assert set(KINDS) - set(ROWS) == set()


def test_no_type_ends_in_an_internal_error():
    rows = ROWS.values()
    assert {row["result"] for row in rows} == {FORECAST, REFUSED} and all(row["detail"] for row in rows)
    assert all("dry run" in row["detail"] and row["trains"] for row in rows if row["result"] == FORECAST)
    assert sum(row["trains"] == YES for row in rows) > 150


def test_the_check_names_new_types_and_those_that_no_longer_train(monkeypatch, capsys):
    monkeypatch.setattr(model_types, "table", lambda: {"bert": ROWS["bert"] | {"trains": YES}})
    monkeypatch.setattr(model_types, "model_types", lambda: ["bert", "brand_new"])
    assert check(ThreadPoolExecutor(1))
    assert capsys.readouterr().out.startswith("never tried: brand_new\nbert no longer trains: model_type bert is an encoder")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind if kind in FEW else pytest.param(kind, marks=pytest.mark.exhaustive) for kind in KINDS])
def test_a_type_is_forecast_or_refused_and_trains_as_the_table_says(kind):
    outcome = outcome_of(kind)
    assert (outcome["result"], outcome["trains"] == YES) == (ROWS[kind]["result"], ROWS[kind]["trains"] == YES), outcome
