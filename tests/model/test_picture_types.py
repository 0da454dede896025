"""Every vision-language type of the installed transformers is in the committed table, with what becomes of its pictures."""

from importlib.util import find_spec

import pytest

from picture_types import COMPARED, NOT_COMPARED, outcome_of, picture_types, table

ROWS = table()


def test_a_type_is_compared_or_has_a_reason_as_the_table_says():
    if find_spec("torchvision") or find_spec("num2words"):
        pytest.skip("these packages give more types a processor")
    outcomes = {kind: outcome_of(kind) for kind in picture_types()}
    assert outcomes == {kind: ROWS[kind] for kind in outcomes}
    assert all(bool(reason) == (result not in (COMPARED, NOT_COMPARED)) for result, reason in ROWS.values())
