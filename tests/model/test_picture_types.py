"""Every vision-language type of the installed transformers is in the committed table, with what becomes of its pictures."""

from importlib.util import find_spec

import pytest
import transformers
from packaging.version import Version

from picture_types import COMPARED, NOT_COMPARED, outcome_of, picture_types, table

ROWS = table()


def test_no_type_of_the_installed_transformers_is_missing_from_the_table():
    assert set(picture_types()) - set(ROWS) == set()


def test_a_type_is_compared_or_has_a_reason_as_the_table_says():
    if find_spec("torchvision") or find_spec("num2words"):
        pytest.skip("these packages give more types a processor")
    outcomes = {kind: outcome_of(kind) for kind in picture_types()}
    assert {kind: result for kind, (result, _) in outcomes.items()} == {kind: ROWS[kind][0] for kind in outcomes}
    other_reasons = {kind for kind, outcome in outcomes.items() if outcome != ROWS[kind]}
    assert other_reasons == ({"gemma3n", "shieldgemma2"} if Version(transformers.__version__) < Version("5.23") else set())
    assert all(bool(reason) == (result not in (COMPARED, NOT_COMPARED)) for result, reason in ROWS.values())
