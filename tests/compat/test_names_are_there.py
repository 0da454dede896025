"""Each name in the registry exists in the installed library and is looked up there."""

from dataclasses import replace

import pytest
from registry import ROWS, problem

WHOLE = next(row for row in ROWS if row.used_by and row.parameters)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_library_has_the_name_and_looks_it_up(row):
    assert problem(row) == ""


@pytest.mark.parametrize(
    ("changes", "what"),
    [({"name": "torch.nn.gone"}, "is gone"), ({"name": "no_library.name"}, "is installed"), ({"parameters": "x"}, ", not x"),
     ({"used_by": "torch.nn.Module.cpu"}, "does not look")],
)  # fmt: skip
def test_what_a_library_has_changed_is_detected(changes, what):
    assert what in problem(replace(WHOLE, **changes))
